"""Draw gaps.png: a forest plot of gaps, and the gaps over training tokens.

There is a panel per reference and a line per model. The columns next to a panel mark provisional gaps (*) and show copy
shares (`Row`); the last panel also has seed and parameter counts. A model without a gap shows its difference at equal
tokens. A second panel below shows the gaps at the runs' ends. report.html (page.py) has the same marks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from seqjax.pictures import COLORS, End, label_ends, log_ticks, shortened
from seqjax.study import gaps as statistic
from seqjax.study.gaps import Row, documents, heights
from seqjax.study.gaps.statistics import Estimate
from seqjax.study.gaps.verdicts import LIMIT
from seqjax.study.report import leaderboard
from seqjax.study.report.figures import clean, save, style, wrapped
from seqjax.study.report.leaderboard import Compared
from seqjax.study.runs.record import Records

GAP = "gap with its 95% interval"
ONE_SEED = "gap without an interval (one seed)"
TUNED = "gap as tuned, each side at its own learning rates"
TOKENS = "no gap: OOD difference at equal tokens"
REFERENCE = "reference"
LOOKS: dict[str, dict[str, Any]] = {
    GAP: {"color": "0.1", "marker": "o", "markersize": 5.5, "elinewidth": 1.8},
    ONE_SEED: {"color": "0.1", "marker": "o", "markersize": 5.5, "markerfacecolor": "white"},
    TUNED: {"color": COLORS[1], "marker": "D", "markersize": 3},
    TOKENS: {"color": "0.55", "marker": "D", "markersize": 4.5, "markerfacecolor": "white", "elinewidth": 1},
    REFERENCE: {"color": "0.55", "marker": "s", "markersize": 5},
}
GAP_KINDS = (GAP, ONE_SEED, TUNED)
OFFSETS = {TUNED: 0.27}  # distance below the model's line, in line heights
HEIGHT = 0.235  # inches per line
SMALL = 7.5  # points
WIDEST = 10.0  # inches, with two references
NAMED = 8  # up to this many lines over tokens, all have names
# Text column -> its width in points.
COLUMNS = {"edge": 30, "copies": 34, "seeds": 32, "params": 38}


class Mark(NamedTuple):
    """Hold an estimate for a model and a reference; `kind` is a key in `LOOKS`."""

    reference: str
    model: str
    kind: str
    estimate: Estimate


def marks(compared: Compared) -> list[Mark]:
    """Return the estimates to draw."""
    all_marks = []
    for reference, rows in compared.items():
        for row in rows:
            if row.gap is not None and row.as_tuned is not None:
                all_marks.append(Mark(reference, row.model, ONE_SEED if row.gap.error is None else GAP, row.gap))
                if row.octaves:
                    all_marks.append(Mark(reference, row.model, TUNED, Estimate(row.as_tuned)))
            elif row.at_equal_tokens is not None:
                all_marks.append(Mark(reference, row.model, TOKENS, row.at_equal_tokens.outside))
        if all_marks and all_marks[-1].reference == reference:
            all_marks.append(Mark(reference, reference, REFERENCE, Estimate(0.0)))
    return all_marks


def order(compared: Compared) -> list[str]:
    """Return the models in line order, best first.

    Models are sorted by the gap to the last reference; a model without this gap uses its gap to another reference.
    Models without any gap come last, sorted by their difference at equal tokens, because this difference does not
    compare with gaps.
    """
    all_marks = marks(compared)[::-1]
    gap_values, token_values = dict[str, float](), dict[str, float]()
    for mark in all_marks:
        if mark.kind in (GAP, ONE_SEED, REFERENCE):
            gap_values.setdefault(mark.model, mark.estimate.value)
    for mark in all_marks:
        if mark.kind == TOKENS and mark.model not in gap_values:
            token_values.setdefault(mark.model, mark.estimate.value)
    return [*sorted(gap_values, key=gap_values.__getitem__), *sorted(token_values, key=token_values.__getitem__)]


def title(records: Records, compared: Compared) -> str:
    """Return the picture's title."""
    n = len(records.domains)
    loss = f"OOD loss (mean of {n} domains)" if n > 1 else f"{records.domains[0]} loss"
    has_gaps = any(mark.kind in GAP_KINDS for mark in marks(compared))
    at = "equal in-domain loss and matched learning rates" if has_gaps else "equal tokens"
    return f"{loss} at {at}; to the right is worse"


def gaps(path: str | Path, records: Records, compared: Compared | None = None) -> None:
    """Draw every model's comparison with each reference.

    The PNG is written to `path`, and an SVG next to it.
    """
    compared = compared or leaderboard.compared(records)
    all_marks, lines = marks(compared), order(compared)
    compared = {name: rows for name, rows in compared.items() if any(mark.reference == name for mark in all_marks)}
    along = {name: over_tokens(records, name, rows) for name, rows in compared.items()}
    n_along = max(map(len, along.values()))
    sizes = [HEIGHT * (len(lines) + 0.8), *([min(2.8, 1.7 + 0.05 * n_along)] if n_along else [])]
    heading = f"{records.title}\n{title(records, compared)}"
    names_width = 0.07 * max(len(shortened(name)) for name in lines)
    width = max(
        min((5.0 if len(compared) == 1 else 3.8) * len(compared) + names_width, WIDEST * max(1, len(compared) / 2)),
        0.08 * max(map(len, heading.split("\n"))) + 0.3,
    )
    figure = Figure(figsize=(width, sum(sizes) + 1.6 + 0.5 * bool(n_along)), layout="constrained")
    axes = figure.subplots(len(sizes), len(compared), squeeze=False, height_ratios=sizes)
    limits, names = _limits(records, all_marks), dict[Axes, list[End]]()
    for i, (reference, rows) in enumerate(compared.items()):
        panel = axes[0][i]
        panel.set_xlabel(f"{wrapped(leaderboard.shown_name(rows, reference), 34)}\n({records.unit.name})")
        panel.set_xlim(*limits)
        draw_marks(panel, [mark for mark in all_marks if mark.reference == reference], lines, records)
        panel.set_yticks(range(len(lines)), [*map(shortened, lines)] if i == 0 else [""] * len(lines), fontsize=8.5)
        cells = {name: {row.model: text for row in rows if (text := text_of(row))} for name, text_of in CELLS.items()}
        if i == len(compared) - 1:
            cells |= _shared_cells(compared)
        _write_columns(panel, cells, lines)
        if n_along:
            names[axes[1][i]] = _draw_along(axes[1][i], records, rows, along[reference])
    handles = _handles(axes[0][0], records, all_marks, [row for rows in compared.values() for row in rows])
    figure.legend(handles=handles, frameon=False, fontsize=8.5, loc="outside lower left", ncols=2)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
    if n_along:
        label_ends(names, fontsize=SMALL)
    save(figure, path)


def _handles(panel: Axes, records: Records, all_marks: Sequence[Mark], rows: Iterable[Row]) -> list[Any]:
    """Return the legend's entries."""
    drawn = {mark.kind for mark in all_marks}
    handles: list[Any] = [
        panel.errorbar([], [], xerr=[] if kind == GAP else None, label=kind, linestyle="none", **look)
        for kind, look in LOOKS.items()
        if kind in drawn
    ]
    if drawn.intersection(GAP_KINDS):
        handles.append(Patch(color="0.93", label=f"gaps from 0 to {LIMIT * records.unit.scale:.2g}"))
    sign = {"color": "0.25", "linestyle": "none", "markersize": 5}
    handles += panel.plot([], [], label="edge: the best learning rate is at the edge of its grid", marker="$*$", **sign)
    if any(row.copy is not None for row in rows):
        copies = "copies: share of the OOD difference from tokens that complete an earlier bigram"
        handles += panel.plot([], [], label=copies, marker=r"$\%$", **sign)
    return handles


def _limits(records: Records, all_marks: Sequence[Mark]) -> tuple[float, float]:
    """Return the limits of the common horizontal axis.

    They include every gap, the grey band, and nearby differences at equal tokens.
    """

    def ends(chosen: Sequence[Mark]) -> list[float]:
        return [mark.estimate.value + sign * (mark.estimate.half or 0.0) for mark in chosen for sign in (-1, 1)]

    gap_ends = ends([mark for mark in all_marks if mark.kind in GAP_KINDS] or all_marks)
    low, high = min(0.0, *gap_ends), max(LIMIT * records.unit.scale, *gap_ends)
    room = 0.3 * (high - low)
    close = [x for x in ends([mark for mark in all_marks if mark.kind == TOKENS]) if low - room < x < high + room]
    low, high = min([low, *close]), max([high, *close])
    return low - 0.03 * (high - low), high + 0.03 * (high - low)


def draw_marks(panel: Axes, chosen: Sequence[Mark], lines: Sequence[str], records: Records) -> None:
    """Draw a reference's estimates at the lines of their models.

    An estimate outside the axis is written as a number at the border.
    """
    if any(mark.kind in GAP_KINDS for mark in chosen):
        panel.axvspan(0, LIMIT * records.unit.scale, color="0.93", linewidth=0, zorder=0)
    panel.axvline(0, color="0.6", linewidth=1, zorder=1)
    low, high = panel.get_xlim()
    for mark in chosen:
        value, y, look = mark.estimate.value, lines.index(mark.model) + OFFSETS.get(mark.kind, 0.0), LOOKS[mark.kind]
        if low <= value <= high:
            panel.errorbar(value, y, xerr=mark.estimate.half, linestyle="none", zorder=3, **look)
        else:
            at, side, text = (low, "left", f"← {value:+.2f}") if value < low else (high, "right", f"{value:+.2f} →")
            panel.text(at, y, text, ha=side, va="center", fontsize=SMALL, color=look["color"])
    panel.set_ylim(len(lines) - 0.4, -0.6)
    panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    clean(panel)
    panel.grid(visible=False, axis="y")
    panel.spines["left"].set_visible(False)
    panel.tick_params(axis="y", length=0)


CELLS: dict[str, Callable[[Row], str]] = {
    "edge": lambda row: "*" if row.provisional else "",
    "copies": lambda row: "" if row.copy is None else f"{row.copy:.0%}",
}


def _shared_cells(compared: Compared) -> dict[str, dict[str, str]]:
    """Return the columns shared by all references: header -> model -> text."""
    rows = [row for reference_rows in compared.values() for row in reference_rows]
    seeds = {row.reference: row.reference_seeds for row in rows} | {row.model: row.seeds for row in rows}
    sizes = {row.reference: row.reference_parameters for row in rows} | {row.model: row.parameters for row in rows}
    texts = {name: size_text(size) for name, size in sizes.items() if size is not None}
    return {"seeds": {name: str(n) for name, n in seeds.items()}, "params": texts}


def _write_columns(panel: Axes, cells: Mapping[str, Mapping[str, str]], lines: Sequence[str]) -> None:
    """Write the text columns to the right of a panel, without empty columns."""
    placement: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
    placement |= {"va": "center", "fontsize": SMALL, "color": "0.25", "annotation_clip": False}
    right = 0
    for name, texts in cells.items():
        if texts:
            right += COLUMNS[name]
            for y, text in enumerate((name, *(texts.get(model, "") for model in lines)), start=-1):
                panel.annotate(text, (1, y), xytext=(right, 0), **placement)


def size_text(n: float) -> str:
    """Return a parameter count with three digits, such as "124M"."""
    unit, name = next(
        (unit, name) for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")) if n >= unit or unit == 1
    )
    return f"{n / unit:.3g}{name}"


# -------------------------------------------------------------------------------------------------------- over tokens
def over_tokens(records: Records, reference: str, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Return gaps at the ends, model -> [ends, (tokens, gap)].

    A model is included if it has a gap and two ends within reach. Gaps are at matched learning rates. They are means
    over the seeds with two ends, at the ends common to these seeds.
    """
    near = statistic.rates(records, reference).near
    reference_ends = [documents.measured_ends(records, run) for run in records.of_model(reference) if run.rate in near]
    if all(len(ends.tokens) < 2 for ends in reference_ends):
        return {}
    curve, reach = heights.fit(reference_ends), heights.REACH * records.unit.scale
    by_model = {}
    for row in rows:
        if row.gap is None or row.as_tuned is None:
            continue
        per_run = []
        for run in statistic.shown_runs(records, row.model):
            ends = documents.measured_ends(records, run)
            level, _ = heights.reference_levels(reference_ends, curve, ends.x, np.zeros_like(curve.linear))
            gap = (ends.y - curve.at(ends.x) - level)[0, :, 0] + row.gap.value - row.as_tuned
            inside = (ends.x[0] >= curve.low[0] - reach) & (ends.x[0] <= curve.high[0] + reach)
            per_run += [dict(zip(ends.tokens[inside], gap[inside], strict=True))] if inside.sum() > 1 else []
        common = sorted(set.intersection(*map(set, per_run))) if per_run else []
        if len(common) > 1:
            by_model[row.model] = np.array([(t, np.mean([run_gaps[t] for run_gaps in per_run])) for t in common])
    return by_model


def _draw_along(panel: Axes, records: Records, rows: Sequence[Row], along: Mapping[str, np.ndarray]) -> list[End]:
    """Draw the gaps at the runs' ends; return the line names.

    With many lines, only lines with a significant trend have a colour and a name.
    """
    if not along:
        panel.set_axis_off()
        return []
    panel.axhspan(0, LIMIT * records.unit.scale, color="0.93", linewidth=0, zorder=0)
    panel.axhline(0, color="0.6", linewidth=1)
    chosen = {row.model for row in rows if row.trend or len(along) <= NAMED}
    names = []
    for i, name in enumerate(records.models):
        if name in along:
            color = style(i)["color"]
            look: dict[str, Any] = style(i) | {"linewidth": 1.2, "markersize": 3.5, "markerfacecolor": color}
            if name not in chosen:
                look = {"color": "0.75", "linewidth": 0.8, "marker": "o", "markersize": 2}
            tokens, values = along[name].T
            panel.plot(tokens / 1e6, values, zorder=3 if name in chosen else 2, **look)
            names += [End(tokens[-1] / 1e6, values[-1], name, look["color"])] if name in chosen else []
    panel.set_xscale("log")
    all_tokens = np.concatenate([points[:, 0] for points in along.values()]) / 1e6
    panel.set_xlim(all_tokens.min() * 0.97, all_tokens.max() * 1.03)
    ticks = log_ticks(all_tokens.min(), all_tokens.max())
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    grey = "" if chosen.issuperset(along) else "; grey lines: no significant trend"
    panel.set_xlabel(f"training tokens (millions){grey}")
    panel.set_ylabel(f"gap ({records.unit.name})")
    clean(panel)
    return names
