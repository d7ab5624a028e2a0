"""What a model costs beside how well it does: a picture of its gap against its speed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqjax.study import comparison, equal_loss
from seqjax.study.figures import save, style
from seqjax.study.records import Records


def gap_over_speed(path: str | Path, records: Records) -> None:
    """Draw every model's gap over its training speed, one panel per length that is known.

    The gap is that to the first reference that has results. The first panel has the speeds of the runs themselves, the
    others those that the study file gives in `speeds`.
    """
    reference = next(name for name in records.references if equal_loss.shown_runs(records, name))
    gaps = gaps_to(records, reference)
    given = {"tokens/s of these runs": run_speeds(records)} | records.speeds
    speeds = {what: of_model for what, of_model in given.items() if gaps.keys() & of_model.keys()}
    figure = Figure(figsize=(4.8 * len(speeds) + 2.6, 5), layout="constrained")
    axes = figure.subplots(1, len(speeds), squeeze=False, sharey=True)[0]
    models = comparison.models(records)
    looks = {name: style(i) | {"linestyle": "none", "markersize": 6} for i, name in enumerate(models)}
    for panel, (what, of_model) in zip(axes, speeds.items(), strict=True):
        _draw(panel, looks, gaps, of_model)
        panel.set_xlabel(what)
    axes[0].set_ylabel(f"gap to {reference}, {comparison.main_quantity(records)} ({records.unit.name})")
    shown = [name for name in models if name in gaps and any(name in of_model for of_model in speeds.values())]
    handles = [axes[0].plot([], [], label=name, **looks[name])[0] for name in shown]
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside right center")
    figure.suptitle(records.title, x=0.01, ha="left", fontsize=11)
    save(figure, path)


def run_speeds(records: Records) -> dict[str, float]:
    """Return the tokens/s of the runs that stand for every model; models whose speed is unknown are left out."""
    found = {name: equal_loss.shown_runs(records, name) for name in comparison.models(records)}
    return {
        name: float(np.median([run.facts["tokens_per_s"] for run in runs]))
        for name, runs in found.items()
        if runs and all(run.facts.get("tokens_per_s") for run in runs)
    }


def gaps_to(records: Records, reference: str) -> dict[str, tuple[float, float]]:
    """Return the main gap of every model and half the width of its interval, 0 if unknown."""
    found = equal_loss.estimates(records, reference)
    return {reference: (0.0, 0.0)} | {name: (e.gap, e.half_width or 0.0) for name, e in found.items()}


def _draw(
    panel: Axes,
    looks: Mapping[str, dict[str, Any]],
    gaps: Mapping[str, tuple[float, float]],
    speeds: Mapping[str, float],
) -> None:
    names = [name for name in looks if name in gaps and name in speeds]
    panel.axhline(0, color="0.6", linewidth=1)
    for name in names:
        gap, width = gaps[name]
        panel.errorbar(speeds[name], gap, yerr=width or None, elinewidth=1, **looks[name])
    panel.set_xscale("log")
    panel.grid(color="0.93")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    low, high = min(speeds[name] for name in names) / 1.3, max(speeds[name] for name in names) * 1.3
    panel.set_xlim(low, high)
    ticks = [digit * 10.0**power for power in range(10) for digit in (1, 2, 5) if low < digit * 10.0**power < high]
    panel.set_xticks(ticks, [f"{tick / 1000:g}k" if tick >= 1000 else f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
