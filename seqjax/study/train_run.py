"""`python -m seqjax.study.train_run --study=FILE --run=INDEX`: train one run of a study in this process.

`seqjax.study.runner` starts these processes and chooses the GPU that each sees.
"""

from absl import logging

from seqjax.arguments import command_parser
from seqjax.errors import run_command
from seqjax.study.studies import load_study
from seqjax.train import train


def main(argv: list[str]) -> None:
    """Train or resume the run."""
    logging.set_verbosity(logging.WARNING)
    parser = command_parser("study", description=__doc__)
    parser.add_argument("--study", required=True, help="as for seqjax study")
    parser.add_argument("--run", required=True, type=int, help="index of the run in the study")
    args = parser.parse_args(argv)
    run = load_study(args.study).runs[args.run]
    assert run.config is not None, "the runner starts only what can be trained"
    train(run.config, run.workdir)


if __name__ == "__main__":
    run_command(main)
