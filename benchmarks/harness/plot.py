"""Plot style: colour-blind safe colours, few axis lines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from seqjax.pictures import COLORS

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">", "h", "d", "p")


def figure(width: float, height: float, *, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of `width` x `height` inches, without pyplot, and its panels with a shared vertical axis."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    all_axes = list(made.subplots(1, panels, squeeze=False, sharey=True)[0])
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    return made, all_axes


class Bar(NamedTuple):
    """A named bar; `runs` are the timed repeats behind `value`, empty if not recorded."""

    name: str
    value: float
    runs: Sequence[float] = ()


def bars(path: Path, rows: Sequence[Bar], *, title: str, axis: str) -> None:
    """Draw horizontal bars with values, first row on top, and whiskers over each bar's repeats."""
    made, (axes,) = figure(7, 0.9 + 0.3 * len(rows))
    ends = [max([row.value, *row.runs]) for row in rows]
    axes.barh([row.name for row in rows], [row.value for row in rows], color=COLORS[5], height=0.7)
    for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
        axes.annotate(
            three_digits(row.value), (end, i), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5
        )
        if len(row.runs) > 1:
            span = [[row.value - min(row.runs)], [max(row.runs) - row.value]]
            axes.errorbar(row.value, i, xerr=span, color="black", linewidth=1.2, capsize=3, capthick=1.2)
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.set_xlim(0, 1.15 * max(ends))
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.tick_params(axis="x", labelsize=9)
    spread = "; whiskers: slowest and fastest repeat" if any(len(row.runs) > 1 for row in rows) else ""
    axes.set_xlabel(f"{axis}{spread}", fontsize=9)
    made.suptitle(title, fontsize=9.5, x=0.01, ha="left")
    save(made, path)


def three_digits(value: float) -> str:
    """Return three significant digits: 517.4 -> "517", 0.04873 -> "0.0487", 2.829 -> "2.83"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def save(made: Any, path: Path) -> None:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=130)
