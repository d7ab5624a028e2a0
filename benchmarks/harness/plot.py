"""The common style of the plots: colours that colour-blind readers tell apart, few lines around the data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, which white paper swallows.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#999999", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*")


def figure(width: float, height: float, *, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches without pyplot, and its panels side by side on one vertical axis."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    all_axes = list(made.subplots(1, panels, squeeze=False, sharey=True)[0])
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    return made, all_axes


def bars(path: Path, rows: Sequence[tuple[str, float]], *, title: str, axis: str) -> None:
    """Horizontal bars with their numbers, the first row at the top."""
    made, (axes,) = figure(7, 0.9 + 0.3 * len(rows))
    values = [value for _, value in rows]
    drawn = axes.barh([name for name, _ in rows], values, color=COLORS[0], height=0.7)
    axes.bar_label(drawn, [three_digits(value) for value in values], padding=3, fontsize=8.5)
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_xlabel(axis, fontsize=9)
    made.suptitle(title, fontsize=9.5, x=0.01, ha="left")
    save(made, path)


def three_digits(value: float) -> str:
    """517.4 -> "517", 0.04873 -> "0.0487", 2.829 -> "2.83"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def save(made: Any, path: Path) -> None:
    """Write a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=130)
