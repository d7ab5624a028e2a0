"""The forest plot of the gaps: a line per model with its gap to each reference and the interval.

Beside the gap at the common learning rate are gaps that test other causes than the architecture (comparison.causes):
each model at its best learning rate, and against a reference whose schedule has also ended. In protocol 2 it is the
range over the learning rates that count (seqjax/study/equal_loss.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from seqjax.study import comparison, equal_loss
from seqjax.study.comparison import Gap, Row
from seqjax.study.figures import save
from seqjax.study.records import Records
from seqjax.pictures import COLORS

SEVERAL_SEEDS = "at the lowest common loss, several seeds"
ONE_SEED = "at the lowest common loss, one seed (interval of documents alone)"
# Offsets below and above a model's line, in its height, of the additional gaps.
OFFSETS = {"learning rate": 0.24, "schedule": -0.24}
LABELS = {"learning rate": "each at its best learning rate", "schedule": "end points, both schedules ended"}
LOOKS: dict[str, dict[str, Any]] = {
    SEVERAL_SEEDS: {"color": "0.1", "marker": "o", "markersize": 6},
    ONE_SEED: {"color": "0.1", "marker": "o", "markersize": 6, "markerfacecolor": "white"},
    "learning rate": {"color": COLORS[1], "marker": "D", "markersize": 4},
    "schedule": {"color": COLORS[0], "marker": "*", "markersize": 7},
}
# Of protocol 2.
ENOUGH = "gap with its 95% interval"
FEW = "gap of fewer than three seeds, no interval"
OVER_RATES = "over all learning rates as good in domain"
PRIMARY_LOOKS: dict[str, dict[str, Any]] = {
    ENOUGH: {"color": "0.1", "marker": "o", "markersize": 6},
    FEW: {"color": "0.1", "marker": "o", "markersize": 6, "markerfacecolor": "white"},
}
RANGE: dict[str, Any] = {"color": COLORS[1], "linewidth": 1, "marker": "|", "markersize": 5}
BELOW = 0.24


def gaps(path: str | Path, records: Records) -> None:
    """Draw the gaps of every model to each reference, best first by those to the last reference."""
    references = [name for name in records.references if comparison.common_runs(records, name)]
    rows = {name: [row for row in comparison.compare(records, name) if row.lowest] for name in references}
    references = [name for name in references if rows[name]]
    main = comparison.main_quantity(records)
    figure, panels, order = _panels(records, references)
    shown: set[str] = set()
    for panel, reference in zip(panels, references, strict=True):
        shown |= _draw(panel, rows[reference], order, main)
    handles = [
        panels[0].plot([], [], linestyle="none", label=LABELS.get(what, what), **look)[0]
        for what, look in LOOKS.items()
        if what in shown
    ]
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    _entitle(figure, records)
    save(figure, path)


def primary_gaps(path: str | Path, records: Records) -> None:
    """Draw the primary gaps of protocol 2 with their intervals, and their range over the eligible learning rates."""
    known = comparison.models(records)  # A reference may have no run yet.
    references = [name for name in records.references if name in known and equal_loss.estimates(records, name)]
    main = comparison.main_quantity(records)
    figure, panels, order = _panels(records, references, primary=True)
    shown: dict[str, Any] = {}
    for panel, reference in zip(panels, references, strict=True):
        panel.axvspan(0, equal_loss.limit(records), color="0.95", linewidth=0, zorder=0)
        panel.axvline(0, color="0.6", linewidth=1)
        for row in equal_loss.compare(records, reference):
            if row.gaps is None:
                continue
            y, estimate = order.index(row.model), row.gaps[main].estimate
            if row.over_rates is not None and row.n_pairs > 1:
                shown[OVER_RATES] = panel.plot(row.over_rates, [y + BELOW] * 2, label=OVER_RATES, **RANGE)[0]
            what = FEW if estimate.half_width is None else ENOUGH
            panel.errorbar(
                estimate.gap, y, xerr=estimate.half_width, elinewidth=2, linestyle="none", **PRIMARY_LOOKS[what]
            )
            shown[what] = panel.plot([], [], linestyle="none", label=what, **PRIMARY_LOOKS[what])[0]
        _clean(panel)
    handles = [shown[what] for what in (ENOUGH, FEW, OVER_RATES) if what in shown]
    handles.append(Patch(color="0.95", label=f"a cost of up to {equal_loss.limit(records):.2g}"))
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    _entitle(figure, records, intervals=ENOUGH in shown)
    save(figure, path)


def _panels(
    records: Records, references: Sequence[str], *, primary: bool = False
) -> tuple[Figure, list[Axes], list[str]]:
    """Return a figure with a panel for each reference, and the models in the order of their lines.

    In protocol 1 the last reference has a line, where it stands at zero. Primary gaps have one scale in all panels, and
    a line for a reference only where it has a gap to another one.
    """
    place = {references[-1]: 0.0}
    known = set()
    for name in reversed(references):  # a model without a gap to the last reference is sorted by its gap to another
        found = equal_loss.estimates(records, name)
        place |= {model: estimate.gap for model, estimate in found.items() if model not in place}
        known |= found.keys()
    if primary and references[-1] not in known:
        del place[references[-1]]
    order = sorted(place, key=place.__getitem__)
    figure = Figure(figsize=(4.4 * len(references) + 2.2, 0.34 * len(order) + 1.9), layout="constrained")
    panels = list(figure.subplots(1, len(references), squeeze=False, sharex=primary, sharey=True)[0])
    for panel, reference in zip(panels, references, strict=True):
        panel.set_xlabel(f"gap to {reference} ({records.unit.name})")
    panels[0].set_yticks(range(len(order)), order)
    panels[0].set_ylim(len(order) - 0.4, -0.6)
    return figure, panels, order


def _entitle(figure: Figure, records: Records, *, intervals: bool = True) -> None:
    main = comparison.main_quantity(records)
    what = "mean out of domain" if main == comparison.EQUAL else main
    title = f"{records.title}\n{what} at equal loss in domain; to the right is worse"
    title += "; 95% intervals" if intervals else ""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def _draw(panel: Axes, rows: Sequence[Row], order: Sequence[str], quantity: str) -> set[str]:
    """Draw the gaps to one reference and return the styles used."""
    shown = set()
    panel.axvline(0, color="0.6", linewidth=1)
    for row in rows:
        y = order.index(row.model)
        assert row.lowest is not None
        drawn = {SEVERAL_SEEDS if row.lowest.seeds > 1 else ONE_SEED: row.lowest}
        # If both best rates are the common one, their gap is the same.
        drawn |= {what: gap for what, gap in comparison.causes(row).items() if gap != row.lowest}
        for what, gap in drawn.items():
            _point(panel, gap, quantity, y + OFFSETS.get(what, 0.0), LOOKS[what])
        shown |= drawn.keys()
    _clean(panel)
    return shown


def _clean(panel: Axes) -> None:
    panel.grid(axis="x", color="0.93")
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _point(panel: Axes, gap: Gap, quantity: str, y: float, look: dict[str, Any]) -> None:
    estimate = gap.estimates[quantity]
    panel.errorbar(estimate.gap, y, xerr=estimate.half_width, elinewidth=1, linestyle="none", **look)
