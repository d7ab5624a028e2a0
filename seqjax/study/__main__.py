"""`python -m seqjax.study --study=configs/studies/NAME.py --out=DIR`: train what is missing, then compare.

A study file has `get_study()`, which returns {"title", "reference", "domains", "runs"}: `runs` maps a label to
{"workdir": DIR, "config": ConfigDict}. Runs that are complete are read; others are trained, or go on. Without "config"
a run is only read. An optional "against" names domains whose mean loss is compared at instead of the training loss.
Writes `points.csv`, `gaps.md` and `losses.png` into DIR.
"""

import argparse
import csv
import importlib.util
import sys
from pathlib import Path
from typing import Any

from seqjax.config import from_config_dict
from seqjax.errors import UserError, run_command
from seqjax.study import figures
from seqjax.study.protocol import Point, gap_rows, read_points
from seqjax.train import train


def load_study(path: Path) -> dict[str, Any]:
    """What the file's `get_study()` returns, checked for its keys."""
    if not path.is_file():
        raise UserError(f"--study: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    study = module.get_study()
    missing = {"title", "reference", "domains", "runs"} - set(study)
    if missing or study["reference"] not in study["runs"]:
        raise UserError(f"{path}: get_study() lacks {sorted(missing) or 'its reference among its runs'}.")
    return study


def write_points(path: Path, runs: dict[str, list[Point]]) -> None:
    """One line per run, evaluation and domain."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", "tokens", "train_loss", "domain", "loss"])
        for name, points in runs.items():
            for p in points:
                for domain, loss in p.domains.items():
                    writer.writerow([name, p.step, p.tokens, f"{p.train_loss:.6f}", domain, f"{loss:.6f}"])


def gap_table(rows: list[dict[str, Any]], domains: list[str], *, x_label: str) -> str:
    """Markdown: each domain's loss and, in brackets, the gap to the reference at the same training loss."""
    lines = [f"| {x_label} | run | {' | '.join(domains)} |", f"|---:|---|{'---:|' * len(domains)}"]
    for row in rows:
        cells = [f"{row[d]:.3f} ({row[f'{d}_gap']:+.3f})" if d in row else "-" for d in domains]
        lines.append(f"| {row['train_loss']:.3f} | {row['run']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Train what is missing, compare, write."""
    parser = argparse.ArgumentParser(prog="python -m seqjax.study", description=__doc__)
    parser.add_argument("--study", required=True, type=Path, help="a file with get_study()")
    parser.add_argument("--out", required=True, type=Path, help="where points.csv, gaps.md and losses.png go")
    args = parser.parse_args(argv)
    study = load_study(args.study)
    runs = {}
    for label, run in study["runs"].items():
        workdir = Path(run["workdir"])
        if "config" in run:
            train(from_config_dict(run["config"]), workdir)
        runs[label] = read_points(workdir, against=study.get("against", ()))
    domains = list(study["domains"])
    args.out.mkdir(parents=True, exist_ok=True)
    write_points(args.out / "points.csv", runs)
    x_label = f"mean loss of {', '.join(study['against'])}" if study.get("against") else "training loss"
    table = gap_table(gap_rows(runs, domains, reference=study["reference"]), domains, x_label=x_label)
    (args.out / "gaps.md").write_text(table)
    figures.against_training_loss(args.out / "losses.png", runs, domains, title=study["title"], x_label=x_label)
    sys.stdout.write(f"{table}\nWritten: {args.out}/points.csv, gaps.md, losses.png\n")


if __name__ == "__main__":
    run_command(main)
