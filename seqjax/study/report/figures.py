"""Draw losses.png: every run's OOD loss against its in-domain loss, during training.

A few models share a panel per domain, or one panel for the mean if there are many domains; each line has its model's
name. Many models are spread over panels with the domain mean, each with the references in grey. If every run has a
single evaluation, all models share the panels as points. A model has a colour (Okabe and Ito), and a marker where
colours repeat; seeds have line styles. Stars mark the ends of runs that also have earlier evaluations.
"""

import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from PIL.PngImagePlugin import PngImageFile

from seqjax.pictures import COLORS, End, Named, label_ends, label_points
from seqjax.study import gaps
from seqjax.study.runs.record import Point, Record, Records, in_domain, losses

# Marker, and whether it is filled: one entry per repetition of the colours.
ROUNDS = (("o", True), ("^", False), ("s", True), ("D", False))
# Line styles by seed.
SEED_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
COLUMNS = 4  # with more domains only the mean is drawn
PANEL_MODELS = len(COLORS)  # models in a panel: with more, colours would repeat
BETTER = "lower is better"
GREY = "0.55"  # references in panels with other models
# Nats above the worst run's lowest in-domain loss. Higher losses are not shown: they are early training steps.
LOSS_RANGE = 0.5
DECIMALS = re.compile(r"(\.\d\d)\d+")  # SVG coordinates keep two decimals
ENDS_LABEL = "ends with a decayed learning rate"
ENDS: dict[str, Any] = {"marker": "*", "markersize": 9, "markerfacecolor": "white", "linestyle": ":", "linewidth": 1.1}


class Line(NamedTuple):
    """Hold a run's losses, by descending in-domain loss.

    `ends` are its ends, if other points were evaluated too.
    """

    run: Record
    points: np.ndarray  # [n, 2]
    ends: np.ndarray


def against_loss_in_domain(path: str | Path, records: Records, *, models: Collection[str] | None = None) -> None:
    """Draw every model's losses, one line per seed.

    The PNG is written to `path`, and an SVG next to it. `models` are drawn with the references; None draws all models.
    A model's look is independent of the selection, but for figures with a panel per family. Raises `UserError` for an
    unknown model.
    """
    for name in models or ():
        gaps.require_model(records, name)
    styles = {name: style(i) for i, name in enumerate(records.models)}
    if models is not None:
        styles = {name: look for name, look in styles.items() if name in {*models, *records.references}}
    runs = {name: gaps.shown_runs(records, name) for name in styles}
    all_runs = [run for model_runs in runs.values() for run in model_runs]
    if all(len(run.points) == 1 for run in all_runs):
        draw = _by_point
    else:
        draw = _by_domain if len(runs) <= PANEL_MODELS else _by_family
    limit = max(in_domain(run.points, records.against).min() for run in all_runs) + LOSS_RANGE * records.unit.scale
    figure = draw(records, runs, styles, limit)
    save(figure, path)


def _line(records: Records, run: Record, domains: Sequence[str], limit: float) -> Line:
    """Return a run's mean losses over domains, up to the in-domain loss `limit`."""

    def curve(points: Sequence[Point]) -> np.ndarray:
        if not points:
            return np.zeros((0, 2))
        x, y = in_domain(points, records.against), losses(points, domains).mean(1)
        xy = np.stack([x, y], 1)[np.argsort(-x, kind="stable")]
        return xy[xy[:, 0] <= limit]

    return Line(run, curve(run.points), curve(run.ends if run.ends != run.points else ()))


Runs = Mapping[str, Sequence[Record]]
Styles = Mapping[str, dict[str, Any]]


def _by_domain(records: Records, runs: Runs, styles: Styles, limit: float) -> Figure:
    """Return a figure with a panel per domain, names at the right."""
    columns = _columns(records.domains)
    width = min(4.8, 8.0 / len(columns))
    figure = Figure(figsize=(width * len(columns) + 1.9, 3.9), layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    ends: list[End] = []
    for panel, (heading, domains) in zip(axes, columns.items(), strict=True):
        ends = []
        for name, model_runs in runs.items():
            lines = [_line(records, run, domains, limit) for run in model_runs]
            for line in lines:
                _draw(panel, line, styles[name])
            end = next((line.points[0] for line in lines if len(line.points)), None)  # at the right
            ends += [] if end is None else [End(float(end[0]), float(end[1]), name, styles[name]["color"])]
        _finish(panel, records, heading)
    axes[0].set_ylabel(f"loss\n({records.unit.name};\n{BETTER})")
    _set_limits(axes)
    _finish_figure(figure, records, runs, limit)
    label_ends({axes[-1]: ends})
    return figure


def _by_point(records: Records, runs: Runs, styles: Styles, limit: float) -> Figure:
    """Return a figure with a panel per domain, in which every run is a point."""
    columns = _columns(records.domains)
    figure = Figure(figsize=(max(5.2, min(5.2 * len(columns), 9.6)), 4.6), layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    labels: dict[Axes, dict[str, Named]] = {panel: {} for panel in axes}
    for panel, (heading, domains) in zip(axes, columns.items(), strict=True):
        for name, model_runs in runs.items():
            lines = [_line(records, run, domains, limit) for run in model_runs]
            for line in lines:
                _draw(panel, line, styles[name])
            points = [(float(x), float(y)) for line in lines for x, y in line.points]
            labels[panel] |= {name: Named(points, styles[name]["color"])} if points else {}
        panel.margins(y=0.1)
        _finish(panel, records, heading)
    axes[0].set_ylabel(f"loss\n({records.unit.name};\n{BETTER})")
    _set_limits(axes)
    _finish_figure(figure, records, runs, limit)
    label_points(labels)
    return figure


def _by_family(records: Records, runs: Runs, styles: Styles, limit: float) -> Figure:
    """Return a figure with a few models per panel, and the references in grey."""
    groups = _families([name for name in runs if name not in records.references])
    n_columns = min(2, len(groups))
    n_rows = -(-len(groups) // 2)
    figure = Figure(figsize=(max(6.0, 4.8 * n_columns), 2.6 * n_rows + 1.6), layout="constrained")
    block: Any = figure.subfigures()  # its labels leave room for the figure's legend
    axes = block.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    lines = {
        name: [_line(records, run, records.domains, limit) for run in model_runs] for name, model_runs in runs.items()
    }
    for panel in axes.flat[len(groups) :]:
        panel.set_axis_off()
        axes[-2][1].tick_params(labelbottom=True)  # no panel is below it
    ends: dict[Axes, list[End]] = {}
    for panel, group in zip(axes.flat, groups, strict=False):
        looks = {
            name: {**styles[name], "color": GREY, "markersize": 2.5} for name in records.references if name in runs
        }
        looks |= {name: styles[name] | {"color": COLORS[i]} for i, name in enumerate(group)}
        for name, look in looks.items():
            look["markerfacecolor"] = look["color"] if styles[name]["markerfacecolor"] != "white" else "white"
            for i, line in enumerate(lines[name]):
                if i == 0 or name not in records.references:
                    _draw(panel, line, look, plain=bool(i))
        ends[panel] = [
            End(float(lines[name][0].points[0, 0]), float(lines[name][0].points[0, 1]), name, looks[name]["color"])
            for name in (looks if panel is axes[0, 0] else group)
            if len(lines[name][0].points)
        ]
        clean(panel)
        panel.tick_params(labelsize=8)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
    domain_text = f"mean of {len(records.domains)} domains" if len(records.domains) > 1 else "".join(records.domains)
    block.supylabel(f"OOD loss, {domain_text}\n({records.unit.name}; {BETTER})", ma="center", fontsize=9)
    block.supxlabel(f"{wrapped(records.in_domain_name, 60)}\n({records.unit.name}; {BETTER})", fontsize=9)
    _set_limits(axes.flat[: len(groups)])
    _finish_figure(figure, records, runs, limit, more="; grey: the references")
    label_ends(ends, fontsize=8)
    return figure


def _families(names: Sequence[str]) -> list[list[str]]:
    """Return the models in groups of at most `PANEL_MODELS`.

    A model and its variants ("m", "m, conv") share a group if it has room.
    """
    families = dict[str, list[str]]()
    for name in names:
        families.setdefault(name.partition(",")[0], []).append(name)
    groups: list[list[str]] = [[] for _ in range(max(1, -(-len(names) // PANEL_MODELS)))]
    for family in sorted(families.values(), key=len, reverse=True):
        for start in range(0, len(family), PANEL_MODELS):
            part = family[start : start + PANEL_MODELS]
            group = min(groups, key=len)
            if len(group) + len(part) > PANEL_MODELS:
                groups.append(group := [])
            group += part
    return groups


def _draw(panel: Axes, line: Line, look: dict[str, Any], *, plain: bool = False) -> None:
    """Draw a run in its model's and seed's style.

    A `plain` line has no markers, unless it is one point.
    """
    look = look | line_style(line.run)
    line_look: dict[str, Any] = look | ({"marker": ""} if plain and len(line.points) > 1 else {})
    panel.plot(*line.points.T, **line_look, zorder=3)
    if len(line.ends):
        panel.plot(*line.ends.T, **ENDS | {"color": look["color"], "markersize": look["markersize"] + 5}, zorder=3)


def _finish(panel: Axes, records: Records, heading: str) -> None:
    panel.set_title(heading, loc="left", fontsize=10)
    panel.set_xlabel(f"{wrapped(records.in_domain_name)}\n({records.unit.name}; {BETTER})")
    clean(panel)


def _finish_figure(figure: Figure, records: Records, runs: Runs, limit: float, *, more: str = "") -> None:
    """Add title and legend.

    Names must be placed after this call, because a legend moves the panels.
    """
    figure.suptitle(f"{records.title}\nOOD loss against in-domain loss{more}", x=0.01, ha="left", fontsize=11)
    all_runs, panel, handles = [run for model_runs in runs.values() for run in model_runs], figure.axes[0], []
    seeds = sorted({run.seed: run for run in all_runs if run.seed}.items())
    for seed, run in seeds[: len(SEED_STYLES) - 1]:  # with more seeds, styles repeat
        look: dict[str, Any] = line_style(run) | {"marker": "", "color": "0.3"}
        handles += panel.plot([], [], label=f"seed {seed}", **look)
    if len(seeds) >= len(SEED_STYLES):
        handles[1:] = []
        handles[0].set_label("further seeds")
    if any(len(_line(records, run, records.domains, limit).ends) for run in all_runs):
        handles += panel.plot([], [], label=ENDS_LABEL, color="0.3", **ENDS)
    if handles:
        figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=4, handlelength=3.2)


def _set_limits(panels: Iterable[Axes]) -> None:
    """Give panels a common horizontal range with room for all markers."""
    panels = list(panels)
    values = np.concatenate([np.asarray(line.get_xdata(), float) for panel in panels for line in panel.lines])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    margin = 0.04 * (high - low) or 0.05
    for panel in panels:
        panel.set_xlim(low - margin, high + margin)


def clean(panel: Axes) -> None:
    """Give a panel a light grid and no frame at the top and right."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="0.93")
    panel.set_axisbelow(True)


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure as PNG to `path` and as SVG next to it.

    Both files have the same bytes every time.
    """
    path, png, svg = Path(path), io.BytesIO(), io.StringIO()
    for text in figure.findobj(Text):  # only tick labels are formulas; a `$` in a name must not start one
        assert isinstance(text, Text)
        is_formula = text.get_text().startswith(r"$\mathdefault")
        text.set_parse_math(is_formula)
        if not is_formula:
            text.set_text(text.get_text().replace(r"\$", "$"))  # `escape.picture` escaped it
    figure.savefig(png, format="png", dpi=130)
    # A palette reduces the PNG to a third. An SVG needs only hundredths of a point, and no indentation.
    PngImageFile(io.BytesIO(png.getvalue())).convert("RGB").quantize(256).save(path, optimize=True)
    # Without a salt an SVG has random identifiers, and without the entry "Date" it contains the time.
    with mpl.rc_context({"svg.hashsalt": "seqjax"}):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: DECIMALS.sub(r"\1", match.group()), svg.getvalue())
    text = re.sub(r"\n +", "\n", text)
    path.with_suffix(".svg").write_text(text, encoding="utf-8")


def style(i: int) -> dict[str, Any]:
    """Return the colour and marker for a study's i-th model; panels per family use their own colours."""
    color = COLORS[i % len(COLORS)]
    marker, filled = ROUNDS[i // len(COLORS) % len(ROUNDS)]
    face = color if filled else "white"
    return {"color": color, "marker": marker, "markerfacecolor": face, "markersize": 4, "linewidth": 1.3}


def line_style(run: Record) -> dict[str, Any]:
    """Return a run's line and marker style, by its seed."""
    if run.seed == 0:
        return {"linestyle": SEED_STYLES[0]}
    return {"linestyle": SEED_STYLES[run.seed % len(SEED_STYLES)], "markersize": 3, "linewidth": 0.9}


def _columns(domains: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return column titles -> the domains whose mean the column shows."""
    if len(domains) > COLUMNS:
        return {f"mean of {len(domains)} domains": domains}
    return {domain: [domain] for domain in domains}


def wrapped(text: str, width: int = 28) -> str:
    """Return a label with line breaks at `width` characters."""
    lines = [""]
    for word in text.split(" "):
        lines += [""] if len(f"{lines[-1]} {word}") > width else []
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
