"""The figure of a study: per domain the loss over the loss in domain, and below it the gap to each reference.

Few models share a panel per domain, or one for the mean if the domains are many, and stand by name at the ends of their
lines. Of many models each has a panel of its own with the mean over domains, where the others are grey; but if every
run has one evaluation alone, all share the panels, however many, and stand by name at their points. A model is a
colour, one of Okabe and Ito's, and a marker where these begin anew; its seeds are line styles, the same for all models.
Learning rates have a picture of their own (end_points.py).
"""

import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL.PngImagePlugin import PngImageFile

from seqjax.pictures import COLORS, End, Named, label_ends, label_points
from seqjax.study import comparison, equal_loss
from seqjax.study.protocol import Record
from seqjax.study.records import Records

# Marker and whether it is filled, one for each round of the colours.
ROUNDS = (("o", True), ("^", False), ("s", True), ("D", False))
# Line styles of the seeds in their order.
OF_SEEDS = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
COLUMNS = 4  # with more domains only the mean is drawn
TOGETHER = len(COLORS)  # more models have a panel each, because their colours begin anew
WIDEST = 6  # panels of models beside each other
ON_WHITE: dict[str, Any] = {"color": "0.3", "bbox": {"color": "white", "pad": 1.5}, "zorder": 4}
# How many ranges above the lowest loss in domain of the worst model: higher losses are the first steps of training.
SHOWN = 5 / 3
DECIMALS = re.compile(r"(\.\d\d)\d+")  # of coordinates in an SVG, that are left out
# The end points of a reference's schedules.
END_POINTS_LABEL = "end points of a reference's schedules"
END_POINTS: dict[str, Any] = {
    "color": "0.3",
    "marker": "*",
    "markersize": 9,
    "markerfacecolor": "white",
    "linestyle": ":",
    "linewidth": 1.1,
}


class Line(NamedTuple):
    """A run's line in a panel; `marked` has the indices of its own evaluations, None for all points."""

    run: Record
    x: np.ndarray
    y: np.ndarray
    marked: list[int] | None = None


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
    runs = {name: equal_loss.shown_runs(records, name) for name in styles if name in chosen}
    runs = {name: of_model for name, of_model in runs.items() if of_model}
    lowest = [run.losses_in_domain(records.against).min() for of_model in runs.values() for run in of_model]
    limit = max(lowest) + SHOWN * records.unit.range
    sections: dict[str, Section] = {f"loss ({records.unit.name})": _losses(records, runs, limit=limit)}
    for reference in records.references:
        if reference in runs:
            section = _gaps(records, runs, runs[reference], limit=limit)
            if next(section(records.domains), None) is not None:  # some model overlaps in domain
                sections[f"gap to {reference} ({records.unit.name})"] = section
    if all(len(run.points) == 1 for of_model in runs.values() for run in of_model):
        draw = _by_point
    else:
        draw = _by_domain if len(runs) <= TOGETHER else _by_model
    figure = draw(records, sections, {name: styles[name] for name in runs}, limit=limit)
    first = figure.axes[0]
    handles = _seed_handles(first, [run for of_model in runs.values() for run in of_model])
    if any(run.schedule != 1 for run in records.runs):
        handles += first.plot([], [], label=END_POINTS_LABEL, **END_POINTS)
    if handles:
        figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=4, handlelength=3.2)
    save(figure, path)


# Yields the lines of every model for the mean over some domains.
Section = Callable[[Sequence[str]], Iterator[tuple[str, Line]]]


def _losses(records: Records, runs: Mapping[str, Sequence[Record]], *, limit: float) -> Section:
    """Return the losses over the loss in domain, up to `limit` there."""

    def lines(domains: Sequence[str]) -> Iterator[tuple[str, Line]]:
        for name, of_model in runs.items():
            for run in of_model:
                x, y = _shown(run.losses_in_domain(records.against), run.losses(domains).mean(1), limit)
                yield name, Line(run, x, y)

    return lines


def _gaps(
    records: Records, runs: Mapping[str, Sequence[Record]], references: Sequence[Record], *, limit: float
) -> Section:
    """Return the gaps to the reference of the same seed over the losses that both passed through."""
    of_seed = {reference.seed: reference for reference in references}

    def lines(domains: Sequence[str]) -> Iterator[tuple[str, Line]]:
        for name, of_model in runs.items():
            for run in of_model:
                other = of_seed.get(run.seed)
                if other is None or other.model == name:
                    continue
                both = [(r.losses_in_domain(records.against), r.losses(domains).mean(1)) for r in (run, other)]
                one, two = (_shown(x, y, np.inf) for x, y in both)
                low, high = max(one[0][0], two[0][0]), min(one[0][-1], two[0][-1], limit)
                knots = np.unique(np.concatenate([one[0], two[0]]))
                knots = knots[(knots >= low) & (knots <= high)]
                # A marker at the run's own evaluations; the line bends at those of the reference as well.
                marked = [int(i) for i in np.flatnonzero(np.isin(knots, one[0]))]
                if len(knots):
                    yield name, Line(run, knots, np.interp(knots, *one) - np.interp(knots, *two), marked or None)

    return lines


def _by_domain(
    records: Records, sections: Mapping[str, Section], styles: Mapping[str, dict[str, Any]], *, limit: float
) -> Figure:
    """Return a figure with a row per section and a column per domain; names stand at the right of the rows."""
    columns = _columns(records.domains)
    width = 3.6 if len(columns) > 1 else 4.8
    figure = Figure(figsize=(width * len(columns) + 1.9, 3.1 * len(sections) + 0.6), layout="constrained")
    axes = figure.subplots(len(sections), len(columns), sharex=True, squeeze=False)
    ends: dict[Axes, list[End]] = {}
    for row, (title, section) in enumerate(sections.items()):
        of_panel: dict[str, End] = {}
        for column, (heading, domains) in enumerate(columns.items()):
            panel = axes[row][column]
            of_panel = {}
            if row:
                panel.axhline(0, color="0.6", linewidth=1)
            else:
                panel.set_title(heading, loc="left", fontsize=10)
                _draw_end_points(panel, records, domains, styles, limit=limit)
            for name, line in section(domains):
                look = styles[name] | line_style(line.run)
                panel.plot(line.x, line.y, markevery=line.marked, **look)
                if len(line.x):  # The lowest loss in domain comes first.
                    of_panel.setdefault(name, End(float(line.x[0]), float(line.y[0]), name, look["color"]))
            _clean(panel)
        axes[row][0].set_ylabel(title.replace(" (", "\n("))
        ends[axes[row][-1]] = list(of_panel.values())
    for panel in axes[-1]:
        panel.set_xlabel(f"{_wrapped(comparison.x_label(records))}\n({records.unit.name})")
    _set_limits(axes.flat)
    figure.suptitle(records.title, x=0.01, ha="left", fontsize=11)
    label_ends(ends)
    return figure


def _by_point(
    records: Records, sections: Mapping[str, Section], styles: Mapping[str, dict[str, Any]], *, limit: float
) -> Figure:
    """Return a figure with a panel per domain, in which every run is a point. Points have no gaps at equal loss."""
    title, section = next(iter(sections.items()))
    columns = _columns(records.domains)
    figure = Figure(figsize=(5.2 * len(columns) + 0.6, 4.4), layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    named: dict[Axes, dict[str, Named]] = {}
    for panel, (heading, domains) in zip(axes, columns.items(), strict=True):
        points: dict[str, list[tuple[float, float]]] = {}
        for name, line in section(domains):
            panel.plot(line.x, line.y, **styles[name] | line_style(line.run))
            points.setdefault(name, []).append((float(line.x[0]), float(line.y[0])))
        named[panel] = {name: Named(at, styles[name]["color"]) for name, at in points.items()}
        panel.margins(y=0.1)
        panel.set_title(heading, loc="left", fontsize=10)
        panel.set_xlabel(f"{_wrapped(comparison.x_label(records))}\n({records.unit.name})")
        _clean(panel)
    axes[0].set_ylabel(title.replace(" (", "\n("))
    _set_limits(axes)
    figure.suptitle(records.title, x=0.01, ha="left", fontsize=11)
    label_points(named)
    return figure


def _by_model(
    records: Records, sections: Mapping[str, Section], styles: Mapping[str, dict[str, Any]], *, limit: float
) -> Figure:
    """Return a figure with a block per section, in which every model has a panel and the others are grey."""
    rows = -(-len(styles) // WIDEST)
    columns = -(-len(styles) // rows)
    width = max(2.0, 0.066 * max(map(len, styles)))  # for the longest name over a panel
    figure = Figure(figsize=(width * columns + 0.6, (1.45 * rows + 0.6) * len(sections) + 0.6), layout="constrained")
    blocks = np.ravel(np.array(figure.subfigures(len(sections), 1)))
    every: list[Axes] = []
    for row, (block, (title, section)) in enumerate(zip(blocks, sections.items(), strict=True)):
        lines: dict[str, list[Line]] = {}
        for name, line in section(records.domains):
            lines.setdefault(name, []).append(line)
        axes = block.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for panel in axes.flat[len(styles) :]:
            panel.set_axis_off()
        for panel in axes[-1 - bool(len(styles) % columns)][len(styles) % columns :]:
            panel.tick_params(labelbottom=True)  # none is below it
        for panel, name in zip(axes.flat, styles, strict=False):
            every.append(panel)
            if row:
                panel.axhline(0, color="0.6", linewidth=1)
                if name not in lines:
                    why = "the reference" if title.startswith(f"gap to {name} (") else "no overlap"
                    panel.text(0.5, 0.08, why, transform=panel.transAxes, ha="center", fontsize=8, **ON_WHITE)
            else:
                own = {name: styles[name]} if name in records.references else {}
                _draw_end_points(panel, records, records.domains, own, limit=limit)
            others = [of_model[0] for other, of_model in lines.items() if other != name]
            # A single path of all others keeps the SVG small.
            marked = [slice(None) if one.marked is None else one.marked for one in others]
            path = [np.stack([one.x[at], one.y[at]], 1) for one, at in zip(others, marked, strict=True)]
            path = [part for points in path for part in (points, np.full((1, 2), np.nan))]
            if path:
                dot = "o" if all(len(points) == 1 for points in path) else ""  # lines of one point do not show
                panel.plot(*np.concatenate(path).T, color="0.85", linewidth=0.7, marker=dot, markersize=3, zorder=1)
            for i, line in enumerate(lines.get(name, ())):
                look = styles[name] | line_style(line.run) | {"markersize": 3}
                look |= {"marker": ""} if i and len(line.x) > 1 else {}  # few markers keep it small, too
                panel.plot(line.x, line.y, markevery=line.marked, zorder=3, **look)
            panel.set_title(name, loc="left", fontsize=8.5, color=styles[name]["color"], pad=3)
            _clean(panel)
            panel.grid(visible=False, axis="x")
            panel.tick_params(labelsize=8)
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
        what = f"mean of {len(records.domains)} domains" if len(records.domains) > 1 else "".join(records.domains)
        block.suptitle(f"{title}, {what}", x=0.01, ha="left", fontsize=10)
        block.supxlabel(f"{comparison.x_label(records)} ({records.unit.name})", fontsize=9)
    _set_limits(every)
    figure.suptitle(f"{records.title}\ngrey: the other models", x=0.01, ha="left", fontsize=11)
    return figure


def _set_limits(panels: Iterable[Axes]) -> None:
    """Give panels one horizontal axis, turned so that training goes from left to right, with room for all markers."""
    panels = list(panels)
    drawn = [line.get_xdata() for panel in panels for line in panel.lines if line.get_transform() == panel.transData]
    values = np.concatenate([np.asarray(x, float) for x in drawn])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    margin = 0.04 * (high - low) or 0.05
    for panel in panels:
        panel.set_xlim(high + margin, low - margin)


def _clean(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="0.93")
    panel.set_axisbelow(True)


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure as PNG at `path` and as SVG beside it; both are the same bytes each time."""
    path, png, svg = Path(path), io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=130)
    # With a palette the PNG has a third of the bytes; an SVG needs no more than hundredths of a point, nor indents.
    PngImageFile(io.BytesIO(png.getvalue())).convert("RGB").quantize(256).save(path, optimize=True)
    # Without a salt the identifiers of an SVG are random, and without this entry it contains the time.
    with mpl.rc_context({"svg.hashsalt": "seqjax"}):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: DECIMALS.sub(r"\1", found.group()), svg.getvalue())
    text = re.sub(r"\n +", "\n", text)
    path.with_suffix(".svg").write_text(text, encoding="utf-8")


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
    panel: Axes, records: Records, domains: Sequence[str], styles: Mapping[str, dict[str, Any]], *, limit: float
) -> None:
    """Draw the line through the end points of a reference's schedules, if it has several."""
    for reference in [name for name in records.references if name in styles]:
        ended = [run for run in records.runs if run.model == reference and run.rate == 1]
        for seed in sorted({run.seed for run in ended}):
            of_seed = [run for run in ended if run.seed == seed]
            if len(of_seed) > 1:
                x = np.array([run.losses_in_domain(records.against)[-1] for run in of_seed])
                y = np.array([run.losses(domains)[-1].mean() for run in of_seed])
                look: dict[str, Any] = END_POINTS | {"color": styles[reference]["color"]}
                panel.plot(*_shown(x, y, limit), **look, zorder=3)
