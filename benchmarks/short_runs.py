"""A short real run of every architecture: does it learn, how fast, in how much memory?

    python -m benchmarks.short_runs --data=DIR [--size=debug|110m] [--steps=200] [--mixers=a,b] [--set=key=value,...]

Each is `seqjax.main` in a process of its own, limited regime, on blocks that `seqjax.data.prepare` made (with
--seq_len of the size: 128 for debug, 2,048 for 110m), then read from its metrics.jsonl: loss per domain at the end, the
first and last training loss, tokens/s as the median of the logged steps after the first quarter (compiling is in the
first), and the device's peak where it counts one. Names may carry settings, as in `benchmarks.train_step`.

Writes benchmarks/results/short_runs_SIZE.json after every run and prints a Markdown table at the end.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.train_step import label, machine, names
from seqjax.data.slimpajama import NAMES, REGIMES
from seqjax.training import metrics

ROOT = Path(__file__).parent.parent


def train(name: str, workdir: Path, settings: list[str], *, size: str, timeout: float) -> str | None:
    """Run `seqjax.main`; the last line of its error, or None."""
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
    """What a finished run's files say."""
    rows = metrics.read(workdir)
    steps = [row for row in rows if "tokens_per_s" in row]
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    last = evaluations[-1]
    rates = [row["tokens_per_s"] for row in steps[len(steps) // 4 :]]
    peaks = [row["device_peak_gib"] for row in steps if row.get("device_peak_gib")]
    return {
        "parameters": json.loads((workdir / "run.json").read_text())["parameters"],
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
        "tokens_per_s": statistics.median(rates),
        "train_loss": [steps[0]["train/loss"], steps[-1]["train/loss"]],
        "loss": {key.split("/")[1]: last[key] for key in last if key.startswith("eval/") and key.endswith("/loss")},
        "device_peak_gib": max(peaks) if peaks else None,
    }


def table(results: dict[str, Any]) -> str:
    """Markdown, lowest in-domain loss first."""
    done = {name: r for name, r in results.items() if "error" not in r}
    domains = [d for d in NAMES if any(d in r["loss"] for r in done.values())]
    head = ["run", "parameters (M)", "tokens/s", "GiB", "train loss, first and last", *domains]
    rows = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]

    def in_domain(item: tuple[str, Any]) -> float:
        losses = item[1]["loss"]
        return sum(losses[d] for d in losses if d in REGIMES["limited"].train)

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
        rows.append("| " + " | ".join([*cells, *(f"{r['loss'][d]:.3f}" for d in domains)]) + " |")
    rows += [f"{label(name)}: {r['error']}" for name, r in results.items() if "error" in r]
    return "\n".join(rows)


def main(argv: list[str]) -> None:
    """Run one after the other, or several at a time on a CPU with cores to spare."""
    del argv
    given: Any = flags.FLAGS
    out, runs = Path(given.json or f"benchmarks/results/short_runs_{given.size}.json"), Path(given.runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = [
        "data.corpus=blocks", "data.tokenizer=mixtral", f"data.path={Path(given.data).resolve()}",
        f"train.steps={given.steps}", "model.vocab_size=32000", "log.every=10", *filter(None, given.set),
    ]  # fmt: skip
    report: dict[str, Any] = {"machine": machine(), "settings": settings, "results": {}}
    start = time.monotonic()
    for name in given.mixers or names():
        workdir = runs / f"{given.size}-{label(name).replace(' ', '-')}"
        left = given.seconds - (time.monotonic() - start)
        error = "not run: out of time" if left < 20 else train(name, workdir, settings, size=given.size, timeout=left)
        report["results"][name] = {"error": error} if error else read(workdir)
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{label(name):<28}{error or report['results'][name]['loss']}", flush=True)
    print(table(report["results"]))


if __name__ == "__main__":
    flags.DEFINE_string("data", None, "Blocks that seqjax.data.prepare made.", required=True)
    flags.DEFINE_string("size", "debug", "Size of the configs.")
    flags.DEFINE_integer("steps", 200, "Optimiser steps.")
    flags.DEFINE_list("mixers", [], "Only these files of configs/; all by default.")
    flags.DEFINE_list("set", [], "More settings for every run, key=value.")
    flags.DEFINE_string("runs", "runs/short", "Where the workdirs go.")
    flags.DEFINE_float("seconds", 86_400, "Begin no further run after so many seconds.")
    flags.DEFINE_string("json", "", "Where the report goes.")
    app.run(main)
