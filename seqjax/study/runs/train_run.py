"""Train one run of a study: `python -m seqjax.study.runs.train_run --study=FILE --run=INDEX`.

`seqjax.study.runs.runner` starts these processes and assigns their GPUs. With `--distributed`, a run has several
processes, which launch/slurm_study.sbatch starts. If they are stopped early, they save and exit with status 130.
"""

import os
import signal
import sys
import threading

from absl import logging

from seqjax.command_line import command_parser, run_command
from seqjax.study.runs.identity import shared_manifest
from seqjax.study.runs.studies import load_study
from seqjax.training.loop import train
from seqjax.training.processes import joined


def main(argv: list[str]) -> None:
    """Train or resume the run."""
    logging.set_verbosity(logging.WARNING)
    parser = command_parser("study", description=__doc__)
    parser.add_argument("--study", required=True, help="as for seqjax study")
    parser.add_argument("--run", required=True, type=int, help="index of the run in the study")
    parser.add_argument("--distributed", action="store_true", help="one process of several, as for seqjax train")
    parser.add_argument("--stop_with_stdin", action="store_true", help="save and stop when standard input ends")
    args = parser.parse_args(argv)
    if args.stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    if args.distributed:
        with joined():
            complete = train_one(args.study, args.run)
        if not complete:
            sys.exit(130)
    else:
        train_one(args.study, args.run)


def train_one(study: str, index: int) -> bool:
    """Train or resume run `index`; return whether it is complete.

    False means that it was stopped early.
    """
    runs = load_study(study).runs
    run = runs[index]
    assert run.config is not None, "the runner starts only what can be trained"
    return train(run.config, run.workdir, manifest=shared_manifest(run, runs))


def _stop_with_stdin() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    run_command(main)
