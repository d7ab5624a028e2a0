"""Figures with a point per run, at its end: loss out of domain over loss in domain, a varied setting, and cost.

Where a model's line by learning rate follows those of the references, the rate explains the difference; where the lines
stay apart at every rate, it does not. The entropy of attention over a setting is in `runs.json` of runs that measured
it (`eval.entropy_tokens`). The cost of a model is its speed, beside its gap.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqjax.pictures import COLORS, Named, label_points, log_ticks
from seqjax.study import comparison, equal_loss
from seqjax.study.figures import END_POINTS, END_POINTS_LABEL, save, style
from seqjax.study.protocol import Record
from seqjax.study.records import Records

SIZE = 5.5  # of the marker of the common learning rate, in points


def by_rate(path: str | Path, records: Records) -> None:
    """Draw every model's end point, or a line through those of its learning rates; larger markers are higher rates.

    The stars on dotted lines are the end points of the references' shorter schedules. Values are means over seeds, and
    unweighted means over domains. The loss in domain is that at which runs are compared.
    """
    names = comparison.models(records)
    figure = Figure(figsize=(8.6, 6), layout="constrained")
    panel = figure.subplots()
    named: dict[str, Named] = {}
    for i, name in enumerate(names):
        ends = comparison.by_rate(records, name)
        if not ends:
            continue
        look = style(i)
        panel.plot(*np.array(list(ends.values())).T, **look | {"marker": "", "linewidth": 1.1})
        for rate, (inside, outside) in ends.items():
            panel.plot(inside, outside, **look | {"linestyle": "none", "markersize": SIZE * rate**0.35})
        # Beside the end that is best in domain, or another where there is no room.
        named[name] = Named(sorted(ends.values()), look["color"])
        if name in records.references and records.protocol == 1:
            shorter = np.array(list(comparison.by_schedule(records, name).values()))
            panel.plot(*shorter.T, **END_POINTS | {"color": look["color"]})
    if any(run.schedule != 1 for run in records.runs):
        panel.plot([], [], label=END_POINTS_LABEL, **END_POINTS)
        panel.legend(frameon=False, fontsize=9, loc="best", handlelength=3.2)
    panel.margins(0.08)
    panel.invert_xaxis()  # As in the picture of the losses: better is to the right.
    panel.set_xlabel(f"{comparison.x_label(records)}, at the end ({records.unit.name})")
    panel.set_ylabel(f"{comparison.main_quantity(records)}, out of domain ({records.unit.name})")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="0.93")
    panel.set_axisbelow(True)
    figure.suptitle(
        f"{records.title}\nend points; larger markers: higher learning rates", x=0.01, ha="left", fontsize=11
    )
    label_points({panel: named})
    save(figure, path)


def over_setting(path: str | Path, records: Records) -> None:
    """Draw the gap to the first reference over `records.sweep`, and beside it the entropy where it was measured.

    Lines are domains, dashed where they are out of domain. Models whose setting is not a number, such as an unset
    window, are left out. Writes a PNG at `path`, and an SVG beside it.
    """
    values = values_of(records)
    reference = next(name for name in records.references if comparison.common_runs(records, name))
    domains = {domain: COLORS[i % len(COLORS)] for i, domain in enumerate((*records.against, *records.domains))}
    entropies = {model: entropy_of(comparison.common_runs(records, model)) for model in values}
    n_panels = 2 if any(entropies.values()) else 1
    figure = Figure(figsize=(5.2 * n_panels + 2.2, 4.2), layout="constrained")
    axes = figure.subplots(1, n_panels, squeeze=False)[0]
    _draw_gaps(axes[0], records, reference, values, domains)
    if n_panels > 1:
        for domain, color in domains.items():
            points = [(values[model], found[domain]) for model, found in entropies.items() if domain in found]
            axes[1].plot(*zip(*sorted(points), strict=True), color=color, **_line(records, domain))
        axes[1].set_ylabel("entropy of attention (nats)")
        axes[1].set_ylim(bottom=0)
    for panel in axes:
        panel.set_xscale("log")
        ticks = sorted(set(values.values()))
        ticks = ticks if len(ticks) > 1 else log_ticks(ticks[0] / 2, ticks[0] * 2)
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel(records.sweep.rpartition(".")[2])
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.93")
        panel.set_axisbelow(True)
    shown = [domain for domain in domains if n_panels > 1 or domain in records.domains]
    handles = [axes[0].plot([], [], color=domains[d], label=d, **_line(records, d))[0] for d in shown]
    if len(records.domains) > 1:
        handles += axes[0].plot([], [], color="0.3", marker="s", markersize=5, label=comparison.EQUAL)
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside right center", handlelength=3.2)
    figure.suptitle(records.title, x=0.01, ha="left", fontsize=11)
    save(figure, path)


def values_of(records: Records) -> dict[str, float]:
    """Return the value of `records.sweep` of every model that has a number there and runs at the common rate."""
    found = {}
    for model in comparison.models(records):
        for run in comparison.common_runs(records, model)[:1]:
            value: Any = run.metadata.get("config")
            for key in records.sweep.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if isinstance(value, int | float) and math.isfinite(value) and value > 0:
                found[model] = float(value)
    return found


def entropy_of(runs: list[Record]) -> dict[str, float]:
    """Return the mean entropy per domain, in nats, over the runs of a model; empty if it was not measured."""
    measured = [run.metadata["entropy"] for run in runs if run.metadata.get("entropy")]
    domains = measured[0] if measured else {}
    return {domain: sum(of_run[domain]["entropy"] for of_run in measured) / len(measured) for domain in domains}


def _line(records: Records, domain: str) -> dict[str, Any]:
    return {"linestyle": "-" if domain in records.against else "--", "marker": "o", "markersize": 4, "linewidth": 1.3}


def _draw_gaps(
    panel: Axes, records: Records, reference: str, values: Mapping[str, float], colors: Mapping[str, str]
) -> None:
    gaps = {row.model: row.lowest.estimates for row in comparison.compare(records, reference) if row.lowest}
    models = sorted((model for model in gaps if model in values), key=lambda model: values[model])
    x = [values[model] for model in models]
    panel.axhline(0, color="0.6", linewidth=1)
    for domain in records.domains:
        panel.plot(x, [gaps[m][domain].gap for m in models], color=colors[domain], **_line(records, domain))
    if len(records.domains) > 1:
        of_mean = [gaps[model][comparison.EQUAL] for model in models]
        widths = [estimate.half_width or 0.0 for estimate in of_mean]
        look: dict[str, Any] = {"color": "0.3", "marker": "s", "markersize": 5, "linewidth": 1.3}
        panel.errorbar(x, [e.gap for e in of_mean], yerr=widths if any(widths) else None, elinewidth=1, **look)
    panel.set_ylabel(f"gap to {reference} ({records.unit.name})")


def gap_over_speed(path: str | Path, records: Records) -> None:
    """Draw every model's gap over its training speed, one panel per length that is known.

    The gap is that to the first reference that has results. The first panel has the speeds of the runs themselves, the
    others those that the study file gives in `speeds`.
    """
    reference = next(name for name in records.references if equal_loss.shown_runs(records, name))
    gaps = gaps_to(records, reference)
    given = {"training speed of these runs (tokens/s)": run_speeds(records)} | records.speeds
    speeds = {what: of_model for what, of_model in given.items() if gaps.keys() & of_model.keys()}
    models = comparison.models(records)
    # More names need more room.
    widths = [5.6 * max(1.0, math.sqrt(len(gaps.keys() & of_model.keys()) / 12)) for of_model in speeds.values()]
    figure = Figure(figsize=(sum(widths) + 0.8, max(widths) - 0.2), layout="constrained")
    axes = figure.subplots(1, len(speeds), squeeze=False, sharey=True, width_ratios=widths)[0]
    looks = {name: style(i) | {"linestyle": "none", "markersize": 6} for i, name in enumerate(models)}
    for panel, (what, of_model) in zip(axes, speeds.items(), strict=True):
        _draw(panel, looks, gaps, of_model)
        panel.set_xlabel(what if "tokens/s" in what else f"{what} (tokens/s)")
    axes[0].set_ylabel(f"gap to {reference}, {comparison.main_quantity(records)} ({records.unit.name})")
    figure.suptitle(records.title, x=0.01, ha="left", fontsize=11)
    label_points(
        {
            panel: {
                name: Named([(of_model[name], gaps[name][0])], looks[name]["color"])
                for name in models
                if name in gaps and name in of_model
            }
            for panel, of_model in zip(axes, speeds.values(), strict=True)
        }
    )
    save(figure, path)


def run_speeds(records: Records) -> dict[str, float]:
    """Return the tokens/s of the runs that represent every model; models of unknown speed are left out."""
    found = {name: equal_loss.shown_runs(records, name) for name in comparison.models(records)}
    return {
        name: float(np.median([run.metadata["tokens_per_s"] for run in runs]))
        for name, runs in found.items()
        if runs and all(run.metadata.get("tokens_per_s") for run in runs)
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
    panel.margins(y=0.08)
    ticks = log_ticks(low, high)
    panel.set_xticks(ticks, [f"{tick / 1000:g}k" if tick >= 1000 else f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
