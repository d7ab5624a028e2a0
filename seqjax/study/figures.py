"""The figure of a study: one panel per domain with its loss over the training loss, one line per run."""

import math
from pathlib import Path

from matplotlib.figure import Figure

from seqjax.study.protocol import Point
from seqjax.training.report import COLORS

# One for each round of the colours.
MARKERS = ("o", "^", "s", "D")


def against_training_loss(
    path: str | Path, runs: dict[str, list[Point]], domains: list[str], *, title: str, x_label: str = "training loss"
) -> None:
    """Plot each domain's loss over the training loss; the lower line generalises better at equal training loss."""
    columns = min(3, len(domains))
    rows = math.ceil(len(domains) / columns)
    figure = Figure(figsize=(3.5 * columns + 2, 3.5 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False)
    largest_shown = min(min(p.train_loss for p in points) for points in runs.values()) + 1.0
    for i, domain in enumerate(domains):
        panel = axes[i // columns][i % columns]
        for j, (name, points) in enumerate(runs.items()):
            shown = [p for p in points if p.train_loss <= largest_shown]
            panel.plot(
                [p.train_loss for p in shown],
                [p.domains[domain] for p in shown],
                marker=MARKERS[j // len(COLORS) % len(MARKERS)],
                markersize=3.5,
                linewidth=1.3,
                color=COLORS[j % len(COLORS)],
                label=name,
            )
        panel.set_title(domain, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.93")
        if i % columns == 0:
            panel.set_ylabel("loss (nats per token)")
        if i // columns == rows - 1:
            panel.set_xlabel(x_label)
    for empty in list(axes.flat)[len(domains) :]:
        empty.set_visible(False)
    axes[0][0].invert_xaxis()  # The axis is shared; inverted, training goes from left to right.
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, fontsize=8.5, loc="outside right center")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=130)
