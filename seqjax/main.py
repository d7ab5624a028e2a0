"""`python -m seqjax.main`, the same as `seqjax train`."""

from seqjax.commands.train import main
from seqjax.utils import run_command

if __name__ == "__main__":
    run_command(main)
