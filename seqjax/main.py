"""`python -m seqjax.main`, the same as `seqjax train`."""

from seqjax.utils import ended_by_ctrl_c, run_command

with ended_by_ctrl_c():
    from seqjax.commands.train import main

if __name__ == "__main__":
    run_command(main)
