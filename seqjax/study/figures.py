"""The figure of a study: per domain the loss over the loss in domain, and below it the gap to each reference.

One column per domain, or one for their mean if they are many. A model is a colour, one of Okabe and Ito's, and a marker
where these begin anew; its seeds are line styles, the same for all models. Learning rates have a picture of their own
(rates.py).
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqjax.study import comparison, equal_loss
from seqjax.study.protocol import Record
from seqjax.study.records import Records
from seqjax.training.report import COLORS

# Marker and whether it is filled, one for each round of the colours.
ROUNDS = (("o", True), ("^", False), ("s", True), ("D", False))
# Line styles of the seeds in their order.
OF_SEEDS = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
COLUMNS = 4  # with more domains only the mean is drawn
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


def against_loss_in_domain(path: str | Path, records: Records, *, models: Collection[str] | None = None) -> None:
    """Draw the losses of every model, one line per seed, and its gaps to each reference.

    The runs are those at the common learning rate; in protocol 2, with a marker for each decayed end, those at the rate
    of the model's primary gap.

    Writes a PNG at `path`, and an SVG beside it. `models` are drawn with the references; None draws all. A model looks
    the same whichever others are drawn. Raises `UserError` for a model that the study does not have.
    """
    styles = {name: style(i) for i, name in enumerate(comparison.models(records))}
    chosen = set(styles) if models is None else {*models, *records.references}
    for name in () if models is None else models:
        comparison.require_model(records, name)
    names = [name for name in styles if name in chosen]
    runs = {name: equal_loss.shown_runs(records, name) for name in names}
    references = [name for name in records.references if runs.get(name)]
    columns = _columns(records.domains)
    n_rows = 1 + len(references)
    width = 3.6 if len(columns) > 1 else 4.8
    figure = Figure(figsize=(width * len(columns) + 2.6, 3.3 * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, len(columns), sharex=True, squeeze=False)
    lowest = [run.losses_in_domain(records.against).min() for group in runs.values() for run in group]
    limit = max(lowest) + SHOWN * records.unit.range
    for column, (title, domains) in enumerate(columns.items()):
        top = axes[0][column]
        for name in names:
            for run in runs[name]:
                x, y = run.losses_in_domain(records.against), run.losses(domains).mean(1)
                top.plot(*_shown(x, y, limit), **styles[name] | line_style(run))
        for reference in references:
            _draw_end_points(top, records, reference, domains, color=styles[reference]["color"], limit=limit)
        top.set_title(title, loc="left", fontsize=10)
        for row, reference in enumerate(references, 1):
            panel = axes[row][column]
            panel.axhline(0, color="0.6", linewidth=1)
            for name in names:
                for run in runs[name]:
                    look = styles[name] | line_style(run)
                    _draw_gap(panel, run, runs[reference], records, domains, limit=limit, style=look)
    for row, label in enumerate([f"loss ({records.unit.name})", *(f"gap to {name}" for name in references)]):
        axes[row][0].set_ylabel(label)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.93")
        panel.set_axisbelow(True)
    for panel in axes[-1]:
        panel.set_xlabel(_wrapped(comparison.x_label(records)))
    axes[0][0].set_xlim(limit, min(lowest) - 0.03)  # Inverted, so that training goes from left to right.
    handles = [axes[0][0].plot([], [], label=name, **styles[name])[0] for name in names if runs[name]]
    handles += _seed_handles(axes[0][0], [run for group in runs.values() for run in group])
    if any(run.schedule != 1 for run in records.runs):
        handles += axes[0][0].plot([], [], label=END_POINTS_LABEL, **END_POINTS)
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside right center", handlelength=3.2)
    figure.suptitle(records.title, x=0.01, ha="left", fontsize=11)
    save(figure, path)


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure as PNG at `path` and as SVG beside it; both are the same bytes each time."""
    path = Path(path)
    figure.savefig(path, dpi=130)
    # Without a salt the identifiers of an SVG are random, and without this entry it contains the time.
    with mpl.rc_context({"svg.hashsalt": "seqjax"}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def style(i: int) -> dict[str, Any]:
    """Return colour and marker of the i-th model of a study, the same in all of its pictures."""
    color = COLORS[i % len(COLORS)]
    marker, filled = ROUNDS[i // len(COLORS) % len(ROUNDS)]
    face = color if filled else "white"
    return {"color": color, "marker": marker, "markerfacecolor": face, "markersize": 4, "linewidth": 1.3}


def line_style(run: Record) -> dict[str, Any]:
    """Return the line and marker style of a run, by its seed."""
    if run.seed == 0:
        return {"linestyle": OF_SEEDS[0]}
    return {"linestyle": OF_SEEDS[run.seed % len(OF_SEEDS)], "markersize": 3, "linewidth": 0.9}


def _seed_handles(panel: Axes, runs: Iterable[Record]) -> list[Any]:
    """Return an entry of the legend for each seed after the first."""
    handles = []
    for seed, run in sorted({run.seed: run for run in runs if run.seed}.items()):
        look: dict[str, Any] = line_style(run) | {"marker": "", "color": "0.3"}
        handles += panel.plot([], [], label=f"seed {seed}", **look)
    return handles


def _columns(domains: Sequence[str]) -> dict[str, list[str]]:
    """Return the domains whose mean a column shows, by its title."""
    if len(domains) > COLUMNS:
        return {f"mean of {len(domains)} domains, each the same": list(domains)}
    return {domain: [domain] for domain in domains}


def _wrapped(text: str, width: int = 40) -> str:
    """Return a label with its list of domains on further lines, where it would be wider than its panel."""
    lines = [""]
    for word in text.split(" "):
        lines += [""] if len(f"{lines[-1]} {word}") > width else []
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _shown(x: np.ndarray, y: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the points in the order of `x`, as they are interpolated, with those above `limit` left out."""
    order = np.argsort(x, kind="stable")
    order = order[x[order] <= limit]
    return x[order], y[order]


def _draw_end_points(
    panel: Axes, records: Records, reference: str, domains: Sequence[str], *, color: str, limit: float
) -> None:
    """Draw the line through the end points of a reference's schedules, if it has several."""
    ended = [run for run in records.runs if run.model == reference and run.rate == 1]
    for seed in sorted({run.seed for run in ended}):
        of_seed = [run for run in ended if run.seed == seed]
        if len(of_seed) > 1:
            x = np.array([run.losses_in_domain(records.against)[-1] for run in of_seed])
            y = np.array([run.losses(domains)[-1].mean() for run in of_seed])
            look: dict[str, Any] = END_POINTS | {"color": color}
            panel.plot(*_shown(x, y, limit), **look, zorder=3)


def _draw_gap(
    panel: Axes,
    run: Record,
    references: list[Record],
    records: Records,
    domains: Sequence[str],
    *,
    limit: float,
    style: dict[str, Any],
) -> None:
    """Draw a run's gap to the reference of its seed over the losses that both passed through."""
    paired = [reference for reference in references if reference.seed == run.seed]
    if not paired or run.model == paired[0].model:
        return
    both = [_shown(r.losses_in_domain(records.against), r.losses(domains).mean(1), np.inf) for r in (run, paired[0])]
    low, high = max(x[0] for x, _ in both), min(x[-1] for x, _ in both)
    knots = np.unique(np.concatenate([x for x, _ in both]))
    knots = knots[(knots >= low) & (knots <= min(high, limit))]
    # A marker at the run's own evaluations; the line bends at those of the reference as well.
    marked = [int(i) for i in np.flatnonzero(np.isin(knots, both[0][0]))]
    gap = np.interp(knots, *both[0]) - np.interp(knots, *both[1])
    panel.plot(knots, gap, markevery=marked or None, **style)
