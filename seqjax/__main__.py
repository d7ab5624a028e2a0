"""Run `python -m seqjax COMMAND`, the same as the command `seqjax`."""

from seqjax.commands.cli import run

if __name__ == "__main__":
    run()
