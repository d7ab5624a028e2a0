"""Run `python -m seqjax.main`, the same as `seqjax train`."""

from seqjax.command_line import run_command
from seqjax.terminal import ended_by_ctrl_c

with ended_by_ctrl_c():
    from seqjax.commands.train import main

if __name__ == "__main__":
    run_command(main)
