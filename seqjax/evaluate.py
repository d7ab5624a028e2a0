"""`python -m seqjax.evaluate`, the same as `seqjax evaluate`."""

from seqjax.utils import ended_by_ctrl_c, run_command

with ended_by_ctrl_c():
    from seqjax.commands.evaluate import main

if __name__ == "__main__":
    run_command(main)
