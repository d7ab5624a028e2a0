"""`python -m seqjax.generate`, the same as `seqjax generate`."""

from seqjax.utils import ended_by_ctrl_c, run_command

with ended_by_ctrl_c():
    from seqjax.commands.generate import main

if __name__ == "__main__":
    run_command(main)
