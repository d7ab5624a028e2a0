"""The picture of the gaps at one look: a line per model with its gap to each reference and the interval.

Beside the gap at the common learning rate stand those that ask whether something else than the architecture is behind
it (comparison.causes): each at its best learning rate, and against a reference whose schedule has ended as well.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqjax.study import comparison
from seqjax.study.comparison import Gap, Row
from seqjax.study.figures import save
from seqjax.study.records import Records
from seqjax.training.report import COLORS

SEVERAL_SEEDS = "at the lowest common loss, several seeds"
ONE_SEED = "at the lowest common loss, one seed (interval of documents alone)"
# Below and above the line of a model, in its height: what stands beside the gap itself.
OFFSETS = {"learning rate": 0.24, "schedule": -0.24}
LABELS = {"learning rate": "each at its best learning rate", "schedule": "end points, both schedules ended"}
LOOKS: dict[str, dict[str, Any]] = {
    SEVERAL_SEEDS: {"color": "0.1", "marker": "o", "markersize": 6},
    ONE_SEED: {"color": "0.1", "marker": "o", "markersize": 6, "markerfacecolor": "white"},
    "learning rate": {"color": COLORS[1], "marker": "D", "markersize": 4},
    "schedule": {"color": COLORS[0], "marker": "*", "markersize": 7},
}


def gaps(path: str | Path, records: Records) -> None:
    """Draw the gaps of every model to each reference, best first by those to the last reference."""
    references = [name for name in records.references if comparison.common_runs(records, name)]
    rows = {name: [row for row in comparison.compare(records, name) if row.lowest] for name in references}
    references = [name for name in references if rows[name]]
    main = comparison.main_quantity(records)
    place = {references[-1]: 0.0}
    for name in reversed(references):  # a model without a gap to the last reference stands by that to another
        place |= {r.model: r.lowest.estimates[main].gap for r in rows[name] if r.lowest and r.model not in place}
    order = sorted(place, key=place.__getitem__)
    figure = Figure(figsize=(4.4 * len(references) + 2.2, 0.34 * len(order) + 1.9), layout="constrained")
    panels = figure.subplots(1, len(references), squeeze=False, sharey=True)[0]
    shown: set[str] = set()
    for panel, reference in zip(panels, references, strict=True):
        shown |= _draw(panel, rows[reference], order, main)
        panel.set_xlabel(f"gap to {reference} ({records.unit.name})")
    panels[0].set_yticks(range(len(order)), order)
    panels[0].set_ylim(len(order) - 0.4, -0.6)
    handles = [
        panels[0].plot([], [], linestyle="none", label=LABELS.get(what, what), **look)[0]
        for what, look in LOOKS.items()
        if what in shown
    ]
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    what = "mean out of domain" if main == comparison.EQUAL else main
    title = f"{records.title}\n{what} at equal loss in domain; to the right is worse; 95% intervals"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    save(figure, path)


def _draw(panel: Axes, rows: Sequence[Row], order: Sequence[str], quantity: str) -> set[str]:
    """Draw the gaps to one reference and return which looks were used."""
    shown = set()
    panel.axvline(0, color="0.6", linewidth=1)
    for row in rows:
        y = order.index(row.model)
        assert row.lowest is not None
        drawn = {SEVERAL_SEEDS if row.lowest.seeds > 1 else ONE_SEED: row.lowest}
        # At the common rate of both the best rates say nothing new.
        drawn |= {what: gap for what, gap in comparison.causes(row).items() if gap != row.lowest}
        for what, gap in drawn.items():
            _point(panel, gap, quantity, y + OFFSETS.get(what, 0.0), LOOKS[what])
        shown |= drawn.keys()
    panel.grid(axis="x", color="0.93")
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    return shown


def _point(panel: Axes, gap: Gap, quantity: str, y: float, look: dict[str, Any]) -> None:
    estimate = gap.estimates[quantity]
    panel.errorbar(estimate.gap, y, xerr=estimate.half_width, elinewidth=1, linestyle="none", **look)
