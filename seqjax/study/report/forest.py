"""The forest plot of the gaps: a line per model with its gap to each reference and the interval.

Beside the gap at the common learning rate are gaps that test other causes than the architecture (comparison.causes):
each model at its best learning rate, and against a reference whose schedule has also ended. In protocol 2 it is the
range over the learning rates that count (seqjax/study/equal_loss.py). The same marks are in report.html (page.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from seqjax.pictures import COLORS
from seqjax.study import comparison, equal_loss
from seqjax.study.figures import save
from seqjax.study.records import Records

SEVERAL_SEEDS = "at the lowest common loss, several seeds"
ONE_SEED = "at the lowest common loss, one seed (interval of documents alone)"
BEST_RATE = "each at its best learning rate"
END_POINTS = "end points, both schedules ended"
# Of protocol 2.
ENOUGH = "gap with its 95% interval"
FEW = "gap without an interval"
OVER_RATES = "over all learning rates as good in domain"
EQUAL_TOKENS = "no overlap in domain: difference at equal tokens"
CAUSES = {"learning rate": BEST_RATE, "schedule": END_POINTS}
LOOKS: dict[str, dict[str, Any]] = {
    SEVERAL_SEEDS: {"color": "0.1", "marker": "o", "markersize": 6},
    ONE_SEED: {"color": "0.1", "marker": "o", "markersize": 6, "markerfacecolor": "white"},
    BEST_RATE: {"color": COLORS[1], "marker": "D", "markersize": 4},
    END_POINTS: {"color": COLORS[0], "marker": "*", "markersize": 7},
    ENOUGH: {"color": "0.1", "marker": "o", "markersize": 6},
    FEW: {"color": "0.1", "marker": "o", "markersize": 6, "markerfacecolor": "white"},
    OVER_RATES: {"color": COLORS[1], "linewidth": 1, "marker": "|", "markersize": 5},
    EQUAL_TOKENS: {"color": "0.5", "marker": "D", "markersize": 5, "markerfacecolor": "white"},
}
# How far below its model's line a mark is, in the height of a line.
OFFSETS = {BEST_RATE: 0.24, END_POINTS: -0.24, OVER_RATES: 0.24}


class Mark(NamedTuple):
    """A gap of a model to a reference, and which one of `LOOKS`; `half_width` is that of its interval, or its range."""

    reference: str
    model: str
    what: str
    gap: float
    half_width: float | None


def references(records: Records) -> list[str]:
    """Return the references to which a model has a gap."""
    known = comparison.models(records)  # A reference may have no run yet.
    return [name for name in records.references if name in known and equal_loss.estimates(records, name)]


def marks(records: Records) -> list[Mark]:
    """Return the gaps that are drawn."""
    main, found = comparison.main_quantity(records), list[Mark]()
    for reference in references(records):
        for row in equal_loss.compare(records, reference) if records.protocol == 2 else ():
            # Without overlap at the best rates, others that are as good may overlap.
            if row.over_rates is not None and (row.n_pairs > 1 or row.gaps is None):
                low, high = row.over_rates
                found.append(Mark(reference, row.model, OVER_RATES, (low + high) / 2, (high - low) / 2))
            if row.gaps is None:
                if row.outside is not None:
                    apart = row.outside.estimate
                    found.append(Mark(reference, row.model, EQUAL_TOKENS, apart.gap, apart.half_width))
                continue
            estimate = row.gaps[main].estimate
            what = FEW if estimate.half_width is None else ENOUGH
            found.append(Mark(reference, row.model, what, estimate.gap, estimate.half_width))
        for row in comparison.compare(records, reference) if records.protocol == 1 else ():
            if row.lowest is None:
                continue
            drawn = {SEVERAL_SEEDS if row.lowest.seeds > 1 else ONE_SEED: row.lowest}
            # If both best rates are the common one, their gap is the same.
            drawn |= {CAUSES[cause]: gap for cause, gap in comparison.causes(row).items() if gap != row.lowest}
            for what, gap in drawn.items():
                estimate = gap.estimates[main]
                found.append(Mark(reference, row.model, what, estimate.gap, estimate.half_width))
    return found


def order(records: Records) -> list[str]:
    """Return the models in the order of their lines, best first by their gaps to the last reference.

    Those with a difference at equal tokens alone come last.
    In protocol 1 the last reference has a line, where it stands at zero; in protocol 2 a reference has one only where
    it has a gap to another one.
    """
    *_, last = shown = references(records)
    place, known = {last: 0.0}, set()
    for name in reversed(shown):  # a model without a gap to the last reference is sorted by its gap to another
        found = equal_loss.estimates(records, name)
        place |= {model: estimate.gap for model, estimate in found.items() if model not in place}
        known |= found.keys()
    if records.protocol == 2 and last not in known:
        del place[last]
    found = marks(records)
    for mark in found:  # of some models there is a range alone
        if mark.what != EQUAL_TOKENS:
            place.setdefault(mark.model, mark.gap)
    tokens = {mark.model: mark.gap for mark in found if mark.model not in place}
    # A model without overlap may have learned less or more from the same tokens: it has no place among the gaps.
    return [*sorted(place, key=place.__getitem__), *sorted(tokens, key=tokens.__getitem__)]


def title(records: Records) -> str:
    """Return what the picture shows, in words."""
    main = comparison.main_quantity(records)
    what = "mean out of domain" if main == comparison.EQUAL else main
    intervals = records.protocol == 1 or any(mark.what == ENOUGH for mark in marks(records))
    return f"{what} at equal loss in domain; to the right is worse{'; 95% intervals' if intervals else ''}"


def gaps(path: str | Path, records: Records) -> None:
    """Draw the gaps of every model to each reference, best first by those to the last reference.

    In protocol 2 these are the primary gaps, on one scale in all panels.
    """
    shown, lines = references(records), order(records)
    figure = Figure(figsize=(4.4 * len(shown) + 2.2, 0.34 * len(lines) + 1.9), layout="constrained")
    panels = list(figure.subplots(1, len(shown), squeeze=False, sharex=records.protocol == 2, sharey=True)[0])
    found = marks(records)
    for panel, reference in zip(panels, shown, strict=True):
        panel.set_xlabel(f"gap to {reference} ({records.unit.name})")
        if records.protocol == 2:
            panel.axvspan(0, equal_loss.limit(records), color="0.95", linewidth=0, zorder=0)
        panel.axvline(0, color="0.6", linewidth=1)
        draw_marks(panel, [mark for mark in found if mark.reference == reference], lines)
    panels[0].set_yticks(range(len(lines)), lines)
    panels[0].set_ylim(len(lines) - 0.4, -0.6)
    drawn = {mark.what for mark in found}
    handles: list[Any] = [
        panels[0].plot([], [], label=what, **({"linestyle": "none"} if what != OVER_RATES else {}) | look)[0]
        for what, look in LOOKS.items()
        if what in drawn
    ]
    if records.protocol == 2:
        handles.append(Patch(color="0.95", label=f"a cost of up to {equal_loss.limit(records):.2g}"))
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    figure.suptitle(f"{records.title}\n{title(records)}", x=0.01, ha="left", fontsize=11)
    save(figure, path)


def draw_marks(panel: Axes, found: Sequence[Mark], lines: Sequence[str]) -> None:
    """Draw the gaps to one reference, each at the height of its model in `lines`."""
    for mark in found:
        y, look = lines.index(mark.model) + OFFSETS.get(mark.what, 0.0), LOOKS[mark.what]
        if mark.what == OVER_RATES:
            assert mark.half_width is not None
            panel.plot([mark.gap - mark.half_width, mark.gap + mark.half_width], [y, y], **look)
        else:
            width = 2 if mark.what == ENOUGH else 1
            panel.errorbar(mark.gap, y, xerr=mark.half_width, elinewidth=width, linestyle="none", **look)
    panel.grid(axis="x", color="0.93")
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
