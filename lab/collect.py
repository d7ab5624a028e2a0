"""Collect runs and gaps from all studies: `python -m lab.collect`.

    lab/results/runs.csv         one row per run; a run in several studies is listed with the largest study
    lab/results/leaderboard.csv  the leaderboard rows of all studies

Both files are generated; do not edit them. Minutes cover training and evaluation, without compilation.
"""

import argparse
import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqjax.config import presets
from seqjax.study.gaps import classes
from seqjax.study.report import leaderboard
from seqjax.study.runs import files
from seqjax.study.runs.record import Record, Records, in_domain, losses

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "lab" / "results"
COLUMNS: tuple[str, ...] = (
    "study",
    "run",
    "model",
    "seed",
    "learning_rate",
    "parameters",
    "tokens",
    "tokens_per_parameter",
)
COLUMNS += ("schedule", "ends", "loss_in_domain", "loss_out_of_domain", "device", "minutes", "tokens_per_s")
COLUMNS += ("commit", "command")
# Commands for studies without a shipped study of the same name. The command for first_110m is lost.
COMMANDS = {
    "first_110m": "",
    "figure4": "seqjax study --study=figure4:small --out=DIR",
    "demo_order": "seqjax judge --config=NAME:demo --out=DIR",
    "ema_110m": "seqjax judge --config=ema.py:110m --out=DIR",
}

# Studies with one seed and one rate -> the study on the same data that supplies rate slope and seed variance.
JOINED = {"switches": ("trunks_110m",), "hybrids": ("trunks_110m",)}


def studies(results: Path) -> list[Path]:
    """Return the directories of all studies in `results`, sorted by name."""
    return sorted(path.parent for path in results.glob("*/points.csv"))


def runs(directories: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the rows of runs.csv."""
    of_study = {directory: files.read_runs(directory) for directory in directories}
    listed: dict[tuple[Any, ...], Path] = {}
    for directory in sorted(of_study, key=lambda d: len(of_study[d]), reverse=True):
        for run in of_study[directory]:
            listed.setdefault(_identity(run), directory)
    return [
        _row(directory, records, run)
        for directory, of_directory in of_study.items()
        for records in [files.read(directory)]
        for run in of_directory
        if listed[_identity(run)] == directory
    ]


def _identity(run: Record) -> tuple[Any, ...]:
    """Return values that identify a run across studies."""
    return run.metadata.get("manifest"), run.model, run.seed, run.last.tokens, run.metadata.get("seconds")


def _row(directory: Path, records: Records, run: Record) -> dict[str, Any]:
    of, config, tokens = run.metadata, run.metadata.get("config", {}), run.last.tokens
    parameters, seconds, speed = (of.get(field) for field in ("parameters", "seconds", "tokens_per_s"))
    values = (
        directory.name,
        run.label,
        run.model,
        run.seed,
        config.get("optim", {}).get("lr", ""),
        parameters or "",
        tokens,
        f"{tokens / parameters:.3f}" if parameters else "",
        "WSD" if run.is_wsd else "linear",
        " ".join(f"{point.tokens / tokens:.3g}" for point in run.ends),
        f"{in_domain([run.last], records.against)[0]:.4f}",
        f"{statistics.mean(losses([run.last], records.domains)[0]):.4f}",
        of.get("device", ""),
        f"{seconds / 60:.1f}" if seconds else "",
        round(speed) if speed else "",
        of.get("commit", "")[:12],
        COMMANDS.get(directory.name, _command(directory.name)),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _command(name: str) -> str:
    """Return the command for a shipped study, or "" for other studies."""
    return f"seqjax study --study={name} --out=DIR" if name in presets.names("studies") else ""


def texts(results: Path) -> dict[str, str]:
    """Return both file contents by name, for all studies in `results`."""
    directories = studies(results)
    of_runs = io.StringIO()
    writer = csv.DictWriter(of_runs, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(runs(directories))
    lines = []
    for directory in directories:
        records = files.read(directory)
        others = [files.read(directory.parent / name) for name in JOINED.get(directory.name, ())]
        compared = leaderboard.compared(records, classes.read(directory), others=others)
        lines += leaderboard.rows(records, compared)
    return {"runs.csv": of_runs.getvalue(), leaderboard.FILE: leaderboard.csv_text(lines)}


def main(argv: Sequence[str] | None = None) -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", type=Path, default=RESULTS, help="directory that holds studies (lab/results)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the two files go (lab/results)")
    args = parser.parse_args(argv)
    for name, text in texts(args.place).items():
        (args.out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
