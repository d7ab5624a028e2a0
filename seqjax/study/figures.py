"""The picture of a study: per domain the loss over the loss in domain, and below it the gap to each reference.

One column per domain. Colours are those of Okabe and Ito; where they begin anew, the marker and the dashes change.
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqjax.study import comparison
from seqjax.study.protocol import Record
from seqjax.study.records import Records
from seqjax.training.report import COLORS

# One for each round of the colours.
ROUNDS = (("o", "-"), ("^", (0, (5, 1.5))), ("s", (0, (1.5, 1.2))), ("D", (0, (5, 1.2, 1.2, 1.2))))
# How many ranges above the lowest loss in domain of the worst model: higher losses are the first steps of training.
SHOWN = 5 / 3
# The end points of a reference's schedules.
END_POINTS_LABEL = "end points of a\nreference's schedules"
END_POINTS: dict[str, Any] = {
    "color": "0.3",
    "marker": "*",
    "markersize": 9,
    "markerfacecolor": "white",
    "linestyle": ":",
    "linewidth": 1.1,
}


def against_loss_in_domain(path: str | Path, records: Records) -> None:
    """Draw the losses of every model at the common rate (one line per seed) and their gaps to each reference."""
    names = comparison.models(records)
    runs = {name: comparison.common_runs(records, name) for name in names}
    references = [name for name in records.references if runs.get(name)]
    styles = {name: style(i) for i, name in enumerate(names)}
    domains = records.domains
    n_rows = 1 + len(references)
    figure = Figure(figsize=(3.6 * len(domains) + 2.6, 3.3 * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, len(domains), sharex=True, squeeze=False)
    lowest = [run.losses_in_domain(records.against).min() for group in runs.values() for run in group]
    limit = max(lowest) + SHOWN * records.unit.range
    for column, domain in enumerate(domains):
        top = axes[0][column]
        for name in names:
            for run in runs[name]:
                x, y = run.losses_in_domain(records.against), run.losses([domain])[:, 0]
                top.plot(*_shown(x, y, limit), **styles[name])
        for reference in references:
            _draw_end_points(top, records, reference, domain, color=styles[reference]["color"], limit=limit)
        top.set_title(domain, loc="left", fontsize=10)
        for row, reference in enumerate(references, 1):
            panel = axes[row][column]
            panel.axhline(0, color="0.6", linewidth=1)
            for name in names:
                for run in runs[name]:
                    _draw_gap(panel, run, runs[reference], records, domain, limit=limit, style=styles[name])
    for row, label in enumerate([f"loss ({records.unit.name})", *(f"gap to {name}" for name in references)]):
        axes[row][0].set_ylabel(label)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.93")
        panel.set_axisbelow(True)
    for panel in axes[-1]:
        panel.set_xlabel(comparison.x_label(records))
    axes[0][0].set_xlim(limit, min(lowest) - 0.03)  # Inverted, so that training goes from left to right.
    handles = [axes[0][0].plot([], [], label=name, **styles[name])[0] for name in names if runs[name]]
    if any(run.schedule != 1 for run in records.runs):
        handles += axes[0][0].plot([], [], label=END_POINTS_LABEL, **END_POINTS)
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside right center", handlelength=3.2)
    figure.suptitle(records.title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=130)


def style(i: int) -> dict[str, Any]:
    """Return colour, marker and dashes of the i-th model of a study, the same in all of its pictures."""
    marker, dashes = ROUNDS[i // len(COLORS) % len(ROUNDS)]
    color = COLORS[i % len(COLORS)]
    return {"color": color, "marker": marker, "linestyle": dashes, "markersize": 4, "linewidth": 1.3}


def _shown(x: np.ndarray, y: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the points in the order of `x`, as they are interpolated, with those above `limit` left out."""
    order = np.argsort(x, kind="stable")
    order = order[x[order] <= limit]
    return x[order], y[order]


def _draw_end_points(panel: Axes, records: Records, reference: str, domain: str, *, color: str, limit: float) -> None:
    """Draw the line through the end points of a reference's schedules, if it has several."""
    ended = [run for run in records.runs if run.model == reference and run.rate == 1]
    for seed in sorted({run.seed for run in ended}):
        of_seed = [run for run in ended if run.seed == seed]
        if len(of_seed) > 1:
            x = np.array([run.losses_in_domain(records.against)[-1] for run in of_seed])
            y = np.array([run.losses([domain])[-1, 0] for run in of_seed])
            panel.plot(*_shown(x, y, limit), **END_POINTS | {"color": color}, zorder=3)


def _draw_gap(
    panel: Axes,
    run: Record,
    references: list[Record],
    records: Records,
    domain: str,
    *,
    limit: float,
    style: dict[str, Any],
) -> None:
    """Draw a run's gap to the reference of its seed over the losses that both passed through."""
    paired = [reference for reference in references if reference.seed == run.seed]
    if not paired or run.model == paired[0].model:
        return
    both = [_shown(r.losses_in_domain(records.against), r.losses([domain])[:, 0], np.inf) for r in (run, paired[0])]
    low, high = max(x[0] for x, _ in both), min(x[-1] for x, _ in both)
    knots = np.unique(np.concatenate([x for x, _ in both]))
    knots = knots[(knots >= low) & (knots <= min(high, limit))]
    # A marker at the run's own evaluations; the line bends at those of the reference as well.
    marked = [int(i) for i in np.flatnonzero(np.isin(knots, both[0][0]))]
    gap = np.interp(knots, *both[0]) - np.interp(knots, *both[1])
    panel.plot(knots, gap, markevery=marked or None, **style)
