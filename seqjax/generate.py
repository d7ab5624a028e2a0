"""`python -m seqjax.generate`, the same as `seqjax generate`."""

from seqjax.commands.generate import main
from seqjax.utils import run_command

if __name__ == "__main__":
    run_command(main)
