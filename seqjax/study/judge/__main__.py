"""Judge a mixer: does it cost base capabilities, and how fast is it?

    seqjax judge --config=FILE_OR_NAME[:SIZE[,...]]

The command trains the mixer and two references, attention as published and with the same block, at the same learning
rates. It then trains further seeds at the rate that suits all models. It prints one sentence and writes DIR/judge.md
(docs/judge.md). After an interruption, the same command resumes. --references keeps the references, so a second mixer
trains only its own runs.

`--runs=DIR` joins a finished study with the same data, tokens and optimiser. `--dry_run` lists the runs, their tokens
and their time, at recorded speeds or timed for three steps on this machine; it needs no data.
"""

import sys

from seqjax.command_line import command_parser, run_command, words
from seqjax.study.judge import page
from seqjax.study.judge.matching import NONE, PARAMS
from seqjax.study.judge.run import checked_jobs, dry_run, plan_of, run
from seqjax.terminal import tell


def main(argv: list[str]) -> None:
    """Judge a mixer and print the sentence."""
    parser = command_parser("judge", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE_OR_NAME[:SIZE[,...]]", help="the mixer's config")
    parser.add_argument("--out", help="directory for the runs and the page (runs/judge/NAME)")
    parser.add_argument("--jobs", type=int, help="number of concurrent runs, each on its own GPU if there are any (1)")
    parser.add_argument("--references", metavar="DIR", help="shared runs of attention (~/.cache/seqjax)")
    parser.add_argument("--seeds", default=3, type=int, help="seeds of the mixer and of the references (3)")
    parser.add_argument(
        "--rates", default="", metavar="A,B,C", help="learning rates of the mixer and the references (recorded ones)"
    )
    parser.add_argument(
        "--match",
        metavar=f"{PARAMS}|{NONE}",
        help="set the MLP width so that the parameters match the reference's, or not (a config of your own is matched "
        "if it does not set model.mlp.dim)",
    )
    parser.add_argument("--runs", action="append", default=[], metavar="DIR", help="join a finished study; repeatable")
    parser.add_argument("--dry_run", action="store_true", help="list the remaining work and its time; train nothing")
    args = parser.parse_args(argv)
    rates, needs_data = words(args.rates), not args.dry_run
    plan = plan_of(
        args.config, args.out, args.references, args.seeds, rates, args.match, args.runs, needs_data=needs_data
    )
    jobs = checked_jobs(args.jobs)
    if args.dry_run:
        tell(dry_run(plan, jobs=jobs))
        return
    try:
        judgement = run(plan, jobs=jobs)
    except KeyboardInterrupt:
        sys.stderr.write("Stopped; every run has saved its state. Resume with the same command.\n")
        sys.exit(130)
    for remark in judgement.remarks:
        tell(f"* {remark}")
    tell(f"\n{judgement.sentence}\nWritten: {judgement.out / page.FILE}")


if __name__ == "__main__":
    run_command(main)
