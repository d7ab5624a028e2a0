"""Train a study's missing runs and compare all runs.

    seqjax study --study=NAME_OR_FILE --out=DIR [--jobs=N]
    seqjax study --configs=transformer_pp,mamba2 --seeds=2 --out=DIR     without a study file: writes DIR/study.py

Complete runs are read. Missing runs are trained or resumed, N at a time. DIR then has `leaderboard.md`,
`leaderboard.csv`, `classes.md` and the pictures (docs/protocol.md), with their data in `points.csv`, `blocks.npz` and
`runs.json`. `metrics.npz` holds the training curves. `--latex` also writes `leaderboard.tex`.

    --partial            train nothing and compare the finished runs; `leaderboard.md` lists the missing runs. A run
                         that has not begun here keeps its results in DIR, so several machines can train in turn.
    --analyse=DIR        make the tables and pictures in DIR again, without the study file and the workdirs;
                         --page adds `report.html`, --reference=MODEL prints the gaps to any model and writes nothing,
                         --runs=DIR2 joins a finished study on the same data, which supplies the learning-rate slope,
                         the seed variance and further seeds
    --compare A B        print the gap of A to B in one line, with interval and p-value, and write nothing. A and B are
                         models in --analyse=DIR or --study=FILE [--out=DIR]. Without either flag, they are workdirs;
                         commas separate a model's seeds.
    --dry_run            list the remaining training and its time, at recorded speeds or timed for three steps here
    --list               show each run's progress
    --only="LABEL|INDEX[;...]"    train only these runs, in this order: one run for a job array, the most important
                         runs if time is short

`seqjax/study/runs/studies.py` describes study files.
"""

import argparse
import sys
from pathlib import Path

from seqjax import store
from seqjax.command_line import command_parser, run_command
from seqjax.errors import UserError
from seqjax.study.report import results
from seqjax.study.runs import estimate, identity, runner
from seqjax.study.runs.studies import load_study, write_study
from seqjax.terminal import tell


def main(argv: list[str]) -> None:
    """Train the missing runs, compare all runs and write the results."""
    parser = command_parser("study", description=__doc__)
    parser.add_argument("--study", help="a shipped study or a file with get_study(): NAME_OR_FILE[:SIZE]")
    parser.add_argument(
        "--configs",
        metavar="A,B",
        help="in place of --study: configs to compare, the reference first; ; between them if they have settings",
    )
    parser.add_argument("--seeds", default=1, type=int, help="with --configs: runs of each (1)")
    parser.add_argument("--out", help="directory for the results")
    parser.add_argument(
        "--jobs", default=1, type=int, help="number of concurrent runs, each on its own GPU if there are any"
    )
    parser.add_argument(
        "--only",
        default="",
        help="train only these runs, by label or index, separated by semicolons; compare nothing",
    )
    parser.add_argument("--list", action="store_true", help="list the runs and their progress")
    parser.add_argument("--dry_run", action="store_true", help="list the remaining work and its time; train nothing")
    parser.add_argument("--partial", action="store_true", help="train nothing; compare the runs that have finished")
    parser.add_argument("--analyse", metavar="DIR", help="make the tables and pictures in DIR again")
    parser.add_argument(
        "--runs", action="append", default=[], metavar="DIR", help="with --analyse: join a finished study"
    )
    parser.add_argument("--latex", action="store_true", help="also write the leaderboard as a LaTeX table")
    parser.add_argument("--page", action="store_true", help="with --analyse: also report.html, an interactive page")
    parser.add_argument("--reference", metavar="MODEL", help="with --analyse: print the gaps to this model instead")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="print the gap of A to B: models of the study, or workdirs"
    )
    args = parser.parse_args(argv)
    for name in ("analyse", "out"):
        if (path := getattr(args, name)) is not None:
            setattr(args, name, store.local(path, f"--{name}"))
    args.runs = [store.local(path, "--runs") for path in args.runs]
    if args.reference and (args.analyse is None or args.page):
        raise UserError("--reference=MODEL prints the gaps of a finished study: --analyse=DIR --reference=MODEL.")
    if args.compare:
        tell(_compare(args))
        return
    if args.analyse is not None:
        if args.study or args.out or args.only or args.list or args.partial:
            raise UserError("--analyse=DIR reads DIR; leave out the other arguments.")
        if args.reference:
            tell(results.gaps_to(args.analyse, args.reference).rstrip("\n"))
            return
        results.analyse(args.analyse, others=args.runs, latex=args.latex, html=args.page)
        return
    if args.runs:
        raise UserError("--runs=OTHER joins another finished study: give --analyse=STUDY --runs=OTHER.")
    if args.page:
        raise UserError("--page makes report.html of a finished study: --analyse=DIR --page.")
    if args.configs:
        if args.study or args.out is None:
            raise UserError("--configs=A,B needs --out=DIR, where it writes the study file, and no --study.")
        configs = args.configs.split(";" if ";" in args.configs else ",")
        args.study = str(write_study(configs, seeds=args.seeds, out=args.out))
    if args.study is None:
        raise UserError("Nothing to compare: give --study=NAME_OR_FILE, --configs=A,B, or --analyse=DIR (finished).")
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {args.jobs}.")
    study = load_study(args.study)
    chosen = runner.select(study.runs, args.only)
    if args.list:
        tell(runner.table(chosen))
        return
    if args.dry_run:
        tell(estimate.report(chosen, jobs=args.jobs))
        return
    out: Path | None = args.out
    if out is None and not args.only:
        raise UserError("--study needs a directory for the tables and pictures: --out=DIR.")
    if args.partial:
        if args.only or out is None:
            raise UserError("--partial compares the finished runs and writes into --out=DIR; leave out --only.")
        results.write_results(study, out, missing=results.unfinished(study), latex=args.latex)
        return
    for run in chosen:  # before hours of training
        identity.require(run)
    try:
        failed = runner.train_all(args.study, chosen, jobs=args.jobs)
    except KeyboardInterrupt:
        sys.stderr.write("Stopped; every run has saved its state. Resume with the same command.\n")
        sys.exit(130)
    if out is not None and not args.only:
        results.write_results(study, out, missing={run.label: "failed" for run in failed}, latex=args.latex)
    if failed:
        raise UserError(f"{len(failed)} of {len(chosen)} runs failed: {', '.join(run.label for run in failed)}.")


def _compare(args: argparse.Namespace) -> str:
    """Return the output line for --compare."""
    if args.only or args.list or args.partial or args.page or args.latex or args.configs or args.reference:
        raise UserError("--compare A B takes --analyse=DIR or --study=FILE [--out=DIR]; leave out the other arguments.")
    if args.analyse is not None:
        if args.study or args.out:
            raise UserError("--analyse=DIR reads only DIR; leave out --study and --out.")
        return results.compare_two(args.analyse, *args.compare)
    if args.study:
        return results.compare_in_study(load_study(args.study), args.out, *args.compare)
    return results.compare_workdirs(*args.compare)


if __name__ == "__main__":
    run_command(main)
