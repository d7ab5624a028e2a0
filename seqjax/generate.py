"""Run `python -m seqjax.generate`, the same as `seqjax generate`."""

from seqjax.command_line import run_command
from seqjax.terminal import ended_by_ctrl_c

with ended_by_ctrl_c():
    from seqjax.commands.generate import main

if __name__ == "__main__":
    run_command(main)
