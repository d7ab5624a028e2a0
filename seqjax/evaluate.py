"""`python -m seqjax.evaluate`, the same as `seqjax evaluate`."""

from seqjax.commands.evaluate import main
from seqjax.utils import run_command

if __name__ == "__main__":
    run_command(main)
