"""Draw lab/results/selection.png: `python -m lab.pages.selection`.

It shows loss against speed for the selection rules of Top-1 Chunk. Speeds come from one run of `benchmarks.train_step`,
gaps from trunks_110m (2,048 tokens), and losses from books_100k. Rules without a speed or a loss are not drawn.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from seqjax.pictures import COLORS, Named, label_points, log_ticks
from seqjax.study import gaps as statistic
from seqjax.study.report import figures
from seqjax.study.runs import files

RESULTS = Path(__file__).parents[1] / "results"
SPEEDS = RESULTS.parents[1] / "benchmarks" / "results" / "train_step_135m_100k_selection_h100.json"
REFERENCE = "Transformer++, QK norm"
# Study label -> benchmark settings; the benchmark's full attention has no QK norm.
RULE = "top1_chunk:model.mixer.selection="
STEPS = {
    REFERENCE: "transformer_pp",
    "Top-1 Chunk, exact": "top1_chunk",
    "Top-1 Chunk, best key": f"{RULE}best_key",
    "Top-1 Chunk, best key, k=4": f"{RULE}best_key,model.mixer.top_k=4",
    "Top-1 Chunk, best key, 32, k=4": f"{RULE}best_key,model.mixer.top_k=4,model.mixer.chunk_size=32",
    "Top-1 Chunk, shortlist": f"{RULE}shortlist",
    "Top-1 Chunk, approx": f"{RULE}approx",
    "Top-1 Chunk, approx, k=4": f"{RULE}approx,model.mixer.top_k=4",
}


def rule(label: str) -> str:
    """Return the part of a label that identifies its rule.

    All settings of a rule share a colour.
    """
    return ",".join(label.split(",")[:2])


def speeds() -> dict[str, float]:
    """Return each model's training speed at 102,400 tokens relative to full attention."""
    results = json.loads(SPEEDS.read_text(encoding="utf-8"))["results"]
    full = results[STEPS[REFERENCE]]["tokens_per_s"]
    return {label: results[name]["tokens_per_s"] / full for label, name in STEPS.items()}


def gaps() -> dict[str, tuple[float, float]]:
    """Return each model's gap to the reference, and half of its interval or 0."""
    estimates = statistic.estimates(files.read(RESULTS / "trunks_110m"), REFERENCE)
    of_models = {label: (estimates[label].value, estimates[label].half or 0.0) for label in STEPS if label in estimates}
    return {REFERENCE: (0.0, 0.0)} | of_models


def losses() -> dict[str, tuple[float, float]]:
    """Return each model's final in-domain loss at 102,400 tokens (with half-width 0)."""
    study = files.read(RESULTS / "books_100k")
    rates = {label: statistic.rates(study, label) for label in study.models if label in STEPS}
    return {label: (of_label.by_rate[of_label.shown][1], 0.0) for label, of_label in rates.items()}


def draw(path: Path) -> None:
    """Draw both panels."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    times = speeds()
    rules = dict.fromkeys(rule(label) for label in STEPS)
    of_rule = dict(zip(rules, COLORS, strict=False))
    colors = {label: of_rule[rule(label)] for label in STEPS}
    panels: dict[Axes, dict[str, Named]] = {}
    for panel, values in ((left, gaps()), (right, losses())):
        look: dict[str, Any] = {"fmt": "o", "capsize": 3, "markersize": 6, "linewidth": 1.2}
        for label, (value, half) in values.items():
            panel.errorbar(times[label], value, yerr=half or None, color=colors[label], **look)
        panels[panel] = {
            label.removeprefix("Top-1 Chunk, "): Named([(times[label], value)], colors[label])
            for label, (value, _) in values.items()
        }
        panel.set_xscale("log")
        panel.set_xlim(0.8, 12)
        ticks = log_ticks(*panel.get_xlim())
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.grid(color="0.93")
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlabel("training speed at 102,400 tokens, times full attention's")
    left.set_ylabel(f"gap to {REFERENCE}\n(nats per token)")
    left.set_title("Trained at 2,048 tokens: OOD loss at equal in-domain loss", loc="left", fontsize=10)
    right.set_ylabel("in-domain loss (nats per token)")
    right.set_title("Trained on books of 102,400 tokens", loc="left", fontsize=10)
    label_points(panels)
    figures.save(figure, path)


if __name__ == "__main__":
    draw(RESULTS / "selection.png")
