"""Train each architecture briefly: final losses, throughput and peak memory.

    python -m lab.benchmarks.short_runs --data=DIR [--size=debug|110m] [--steps=200] [--mixers=a,b] [--set=KEY=VALUE]

Each run is `seqjax.main` in a separate process, in the limited regime. The data are blocks from `seqjax.data.prepare`,
with --seq_len as in the size: 128 for debug, 2,048 for 110m. The script reads each run's metrics.jsonl. It reports the
final loss per domain, the first and last training loss, the median tokens/s and the device's peak memory if available.
The median leaves out the first quarter of the logged steps, which contains compilation. Names may include settings, as
in `benchmarks.train_step`.

Writes benchmarks/results/short_runs_SIZE.json after each run (partial runs: runs/benchmarks/), and prints a Markdown
table at the end.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__)
FLAGS.add_argument("--data", required=True, help="blocks that seqjax.data.prepare made")
FLAGS.add_argument("--size", default="debug", help="size of the configs (debug)")
FLAGS.add_argument("--steps", type=int, default=200, help="optimiser steps (200)")
FLAGS.add_argument("--mixers", type=options.words, default=[], help="only these configs; all by default")
FLAGS.add_argument("--set", type=options.words, default=[], help="more settings for every run, key=value")
FLAGS.add_argument("--runs", default="runs/short", help="where the workdirs go (runs/short)")
FLAGS.add_argument("--seconds", type=float, default=86_400, help="begin no further run after so many (86400)")
options.parse_early(FLAGS, __name__)

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.harness.configs import chosen, label
from benchmarks.harness.machine import machine
from seqjax.command_line import run_command
from seqjax.data.regimes import REGIMES
from seqjax.data.slimpajama import NAMES
from seqjax.reading import read_json
from seqjax.training import metrics

ROOT = Path(__file__).parents[2]


def train(name: str, workdir: Path, settings: list[str], *, size: str, timeout: float) -> str | None:
    """Run `seqjax.main`; return the last line of its error, or None."""
    stem, _, own = name.partition(":")
    arg = ",".join([size, "limited", *filter(None, [own, *settings])])
    command = [sys.executable, "-m", "seqjax.main", f"--config={ROOT}/configs/{stem}.py:{arg}", f"--workdir={workdir}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout:.0f} s"
    if workdir.is_dir():
        (workdir / "log.txt").write_text(done.stdout + done.stderr)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def read(workdir: Path) -> dict[str, Any]:
    """Read the results from a finished run's files."""
    rows = metrics.read(workdir)
    steps = [row for row in rows if "tokens_per_s" in row]
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    last = evaluations[-1]
    rates = [row["tokens_per_s"] for row in steps[len(steps) // 4 :]]
    peaks = [row["device_peak_gib"] for row in steps if row.get("device_peak_gib")]
    return {
        "parameters": read_json(workdir / "run.json")["parameters"],
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
        "tokens_per_s": statistics.median(rates),
        "train_loss": [steps[0]["train/loss"], steps[-1]["train/loss"]],
        "loss": {key.split("/")[1]: last[key] for key in last if key.startswith("eval/") and key.endswith("/loss")},
        "device_peak_gib": max(peaks) if peaks else None,
    }


def table(results: dict[str, Any]) -> str:
    """Return a Markdown table, lowest in-domain loss first and failed runs last."""
    done = {name: r for name, r in results.items() if "error" not in r}
    domains = [d for d in NAMES if any(d in r["loss"] for r in done.values())]

    def in_domain(item: tuple[str, Any]) -> float:
        losses = item[1]["loss"]
        return sum(losses[d] for d in losses if d in REGIMES["limited"].train)

    rows = []
    for name, r in sorted(done.items(), key=in_domain):
        peak = f"{r['device_peak_gib']:.1f}" if r["device_peak_gib"] else "-"
        first, last = r["train_loss"]
        cells = [
            label(name),
            f"{r['parameters'] / 1e6:.2f}",
            f"{r['tokens_per_s']:,.0f}",
            peak,
            f"{first:.2f} {last:.2f}",
        ]
        rows.append([*cells, *(f"{r['loss'][d]:.3f}" for d in domains)])
    headings = ["run", "parameters (M)", "tokens/s", "GiB", "train loss, first and last", *domains]
    failed = [f"{label(name)}: {r['error']}" for name, r in results.items() if "error" in r]
    return "\n".join([report.markdown(headings, rows), *failed])


def main(argv: list[str]) -> None:
    """Run each architecture."""
    args = FLAGS.parse_args(argv)
    path = options.destination(args.json, f"short_runs_{args.size}", recorded=not args.mixers)
    runs = Path(args.runs)
    settings = [
        "data.corpus=blocks", "data.tokenizer=mixtral", f"data.path={Path(args.data).resolve()}",
        f"train.steps={args.steps}", "model.vocab_size=32000", "log.every=10", *filter(None, args.set),
    ]  # fmt: skip
    written: dict[str, Any] = {"machine": machine(), "settings": settings, "results": {}}
    start = time.monotonic()
    for name in chosen(args.mixers):
        workdir = runs / f"{args.size}-{label(name).replace(' ', '-')}"
        left = args.seconds - (time.monotonic() - start)
        error = "not run: out of time" if left < 20 else train(name, workdir, settings, size=args.size, timeout=left)
        written["results"][name] = {"error": error} if error else read(workdir)
        report.save(path, written)
        print(f"{label(name):<28}{error or written['results'][name]['loss']}", flush=True)
    print(table(written["results"]))
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
