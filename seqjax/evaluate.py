"""Run `python -m seqjax.evaluate`, the same as `seqjax evaluate`."""

from seqjax.command_line import run_command
from seqjax.terminal import ended_by_ctrl_c

with ended_by_ctrl_c():
    from seqjax.commands.evaluate import main

if __name__ == "__main__":
    run_command(main)
