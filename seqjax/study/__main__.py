"""Trains what is missing of a study and compares its runs: `seqjax study --study=NAME_OR_FILE --out=DIR [--jobs=N]`.

Complete runs are read; the others are trained or resumed, N at a time. The command writes `points.csv`, `gaps.md` and
`losses.png` into DIR. `--list` shows the progress of the runs; `--only=LABEL|INDEX` trains one alone, for job arrays.
`seqjax/study/studies.py` describes the content of a study file.
"""

import csv
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from seqjax.arguments import command_parser
from seqjax.errors import UserError, run_command
from seqjax.study import figures, runner
from seqjax.study.protocol import Point, gap_rows, read_points
from seqjax.study.studies import Study, load_study


def write_points(path: str | Path, runs: dict[str, list[Point]]) -> None:
    """Write one line per run, evaluation and domain as CSV; losses are in nats per token."""
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", "tokens", "train_loss", "domain", "loss"])
        for name, points in runs.items():
            for p in points:
                for domain, loss in p.domains.items():
                    writer.writerow([name, p.step, p.tokens, f"{p.train_loss:.6f}", domain, f"{loss:.6f}"])


def gap_table(rows: list[dict[str, Any]], domains: list[str], *, x_label: str) -> str:
    """Return Markdown: each domain's loss and, in parentheses, its gap to the reference at the same training loss."""
    lines = [f"| {x_label} | run | {' | '.join(domains)} |", f"|---:|---|{'---:|' * len(domains)}"]
    for row in rows:
        cells = [f"{row[d]:.3f} ({row[f'{d}_gap']:+.3f})" if d in row else "-" for d in domains]
        lines.append(f"| {row['train_loss']:.3f} | {row['run']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Train the runs that are missing, compare them and write the results."""
    parser = command_parser("study", description=__doc__)
    parser.add_argument(
        "--study", required=True, help="a shipped study or a file with get_study(): NAME_OR_FILE[:SIZE]"
    )
    parser.add_argument("--out", type=Path, help="directory for points.csv, gaps.md and losses.png")
    parser.add_argument(
        "--jobs", default=1, type=int, help="number of concurrent runs, each on its own GPU if there are any"
    )
    parser.add_argument("--only", default="", help="train one run alone, by label or index, and compare nothing")
    parser.add_argument("--list", action="store_true", help="list the runs and their progress")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {args.jobs}.")
    study = load_study(args.study)
    chosen = runner.select(study.runs, args.only)
    if args.list:
        sys.stdout.write(runner.table(chosen) + "\n")
        return
    if args.out is None and not args.only:
        raise UserError("Say where the tables and pictures go: --out=DIR.")
    try:
        failed = runner.train_all(args.study, chosen, jobs=args.jobs)
    except KeyboardInterrupt:
        sys.stderr.write("Stopped; every run has saved where it is. Go on with the same command.\n")
        sys.exit(130)
    if args.out is not None and not args.only:
        write_results(study, args.out, without={run.label for run in failed})
    if failed:
        raise UserError(f"{len(failed)} of {len(chosen)} runs failed: {', '.join(run.label for run in failed)}.")


def write_results(study: Study, out: str | Path, *, without: Collection[str] = ()) -> None:
    """Write the points, the gap table and the figure into `out`; raise `UserError` if the reference has failed."""
    out = Path(out)
    runs = {r.label: read_points(r.workdir, against=study.against) for r in study.runs if r.label not in without}
    if study.reference not in runs:
        raise UserError(f"The reference, {study.reference}, has failed: there is nothing to compare with.")
    domains = list(study.domains)
    out.mkdir(parents=True, exist_ok=True)
    write_points(out / "points.csv", runs)
    x_label = f"mean loss of {', '.join(study.against)}" if study.against else "training loss"
    table = gap_table(gap_rows(runs, domains, reference=study.reference), domains, x_label=x_label)
    (out / "gaps.md").write_text(table)
    figures.against_training_loss(out / "losses.png", runs, domains, title=study.title, x_label=x_label)
    sys.stdout.write(f"{table}\nWritten: {out}/points.csv, gaps.md, losses.png\n")


if __name__ == "__main__":
    run_command(main)
