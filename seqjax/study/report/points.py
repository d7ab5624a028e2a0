"""Pictures with a point per model or rate: last losses by learning rate, gaps over a setting, and gaps over speed.

rates.png tells whether the learning rate explains a difference: it does where a model's line over its rates follows
the reference's, and does not where the lines stay apart. sweep.png also has the entropy of attention where runs
measured it (`eval.entropy_tokens`). cost.png has one panel for the logged speed and one per table in `speeds`. With
many models the points have numbers, in the order of the gaps, and the names are in a legend.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqjax.pictures import COLORS, Named, label_points, log_ticks, shortened
from seqjax.study import gaps
from seqjax.study.gaps import Row
from seqjax.study.gaps.statistics import Estimate
from seqjax.study.report import leaderboard
from seqjax.study.report.figures import BETTER, clean, save, style, wrapped
from seqjax.study.report.leaderboard import Compared
from seqjax.study.runs.record import MEAN, Record, Records

SIZE = 5.5  # of the marker of the rate 1, in points
NAMED = 12  # models with names at the points of a panel; numbers of more have room beside their points


def by_rate(path: str | Path, records: Records) -> None:
    """Draw every model's last losses at each of its learning rates, as a line; larger markers are higher rates.

    Values are means over seeds and domains. Writes a PNG at `path`, and an SVG next to it.
    """
    found = {name: gaps.rates(records, name).found for name in records.models}
    shown = sorted(found, key=lambda name: min(outside for _, _, outside in found[name].values()))
    numbers = _numbers(shown, 2 * NAMED)
    figure = Figure(figsize=(9.6 if numbers else 8.6, 6.4), layout="constrained")
    panel = figure.subplots()
    named: dict[str, Named] = {}
    looks = {name: style(i) for i, name in enumerate(records.models)}
    for name, look in looks.items():
        ends = {rate: (inside, outside) for rate, (_, inside, outside) in found[name].items()}
        panel.plot(*np.array(list(ends.values())).T, **look | {"marker": "", "linewidth": 1.1})
        for rate, (inside, outside) in ends.items():
            panel.plot(inside, outside, **look | {"linestyle": "none", "markersize": SIZE * rate**0.35})
        # At the point that is best in domain, or another where there is no room.
        named[numbers.get(name, name)] = Named(sorted(ends.values()), look["color"])
    panel.margins(0.08)
    panel.set_xlabel(f"{records.in_domain_name}, last ({records.unit.name}; {BETTER})")
    panel.set_ylabel(f"{records.quantities[0]} loss, last ({records.unit.name}; {BETTER})")
    clean(panel)
    about = "Last losses at each learning rate; larger markers: higher rates"
    figure.suptitle(f"{records.title}\n{about}", x=0.01, ha="left", fontsize=11)
    _add_names(panel, numbers, looks)
    label_points({panel: named})
    save(figure, path)


def _numbers(names: Sequence[str], most: int) -> dict[str, str]:
    """Return the number of each model, from the bottom of a panel; none of at most `most` models."""
    return {name: str(i) for i, name in enumerate(names, start=1)} if len(names) > most else {}


def _add_names(panel: Axes, numbers: Mapping[str, str], looks: Mapping[str, Mapping[str, Any]]) -> None:
    """Add a legend with the names of numbered models, from the top as in the panels."""
    if not numbers:
        return
    figure = panel.get_figure(root=True)
    assert figure is not None
    handles = [
        panel.plot([], [], label=f"{number:\u2007>2}  {shortened(name)}", **{**looks[name], "linestyle": "none"})[0]
        for name, number in reversed(list(numbers.items()))
    ]
    figure.legend(handles=handles, frameon=False, fontsize=8.5, loc="outside right center", handletextpad=0.1)


# ---------------------------------------------------------------------------------------------------- over a setting
def over_setting(path: str | Path, records: Records, compared: Compared | None = None) -> None:
    """Draw the gap to the first reference over `records.sweep`, and next to it the entropy where it was measured.

    Lines are domains, dashed where they are OOD. Without any gap, the differences at equal tokens are drawn. Models
    whose setting is not a number, such as an unset window, are left out. Writes a PNG at `path`, and an SVG next to it.
    """
    values = values_of(records)
    reference, rows = next(iter((compared or leaderboard.compared(records)).items()))
    rows = sorted((row for row in rows if row.model in values), key=lambda row: values[row.model])
    domains = {domain: COLORS[i % len(COLORS)] for i, domain in enumerate((*records.against, *records.domains))}
    entropies = {model: entropy_of(gaps.shown_runs(records, model)) for model in values}
    n_panels = 2 if any(entropies.values()) else 1
    figure = Figure(figsize=(3.9 * n_panels + 1.8, 4.2), layout="constrained")
    axes = figure.subplots(1, n_panels, squeeze=False)[0]
    axes[0].axhline(0, color="0.6", linewidth=1)
    for name, estimates in _of_setting(records, rows).items():
        x = [values[model] for model in estimates]
        look = _look(records, name) | {"color": domains.get(name, "0.3" if name == MEAN else "0.6")}
        widths = [estimate.half or 0.0 for estimate in estimates.values()] if name not in domains else []
        y = [estimate.value for estimate in estimates.values()]
        axes[0].errorbar(x, y, yerr=widths if any(widths) else None, elinewidth=1, label=name, **look)
    what = leaderboard.what_is_shown(rows, reference).removeprefix("OOD ")
    axes[0].set_ylabel(f"{what}\n({records.unit.name})")
    if n_panels > 1:
        for domain, color in domains.items():
            points = [(values[model], found[domain]) for model, found in entropies.items() if domain in found]
            label = "" if domain in axes[0].get_legend_handles_labels()[1] else domain
            axes[1].plot(*zip(*sorted(points), strict=True), color=color, label=label, **_look(records, domain))
        axes[1].set_ylabel("entropy of attention (nats)")
        axes[1].set_ylim(bottom=0)
    for panel in axes:
        panel.set_xscale("log")
        ticks = sorted(set(values.values()))
        ticks = ticks if len(ticks) > 1 else log_ticks(ticks[0] / 2, ticks[0] * 2)
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel(records.sweep.rpartition(".")[2])
        clean(panel)
    figure.legend(frameon=False, fontsize=9, loc="outside right center", handlelength=3.2)
    figure.suptitle(records.title, x=0.01, ha="left", fontsize=11)
    save(figure, path)


def values_of(records: Records) -> dict[str, float]:
    """Return the value of `records.sweep` of every model that has a positive number there."""
    found = {}
    for model in records.models:
        value: Any = gaps.shown_runs(records, model)[0].metadata.get("config")
        for key in records.sweep.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float) and math.isfinite(value) and value > 0:
            found[model] = float(value)
    return found


def entropy_of(runs: Sequence[Record]) -> dict[str, float]:
    """Return the mean entropy per domain, in nats, over the runs of a model; empty if it was not measured."""
    measured = [run.metadata["entropy"] for run in runs if run.metadata.get("entropy")]
    domains = measured[0] if measured else {}
    return {domain: sum(of_run[domain]["entropy"] for of_run in measured) / len(measured) for domain in domains}


def _of_setting(records: Records, rows: Sequence[Row]) -> dict[str, dict[str, Estimate]]:
    """Return the values that are drawn over a setting, by the name of their line and by model."""
    if any(row.gap is not None for row in rows):
        return {name: {r.model: r.gaps[name] for r in rows if name in r.gaps} for name in records.quantities}
    apart = {row.model: row.at_equal_tokens for row in rows if row.at_equal_tokens is not None}
    return {MEAN: {model: both.outside for model, both in apart.items()}} | {
        "in domain": {model: both.inside for model, both in apart.items()}
    }


def _look(records: Records, name: str) -> dict[str, Any]:
    if name == MEAN:
        return {"linestyle": "-", "marker": "s", "markersize": 5, "linewidth": 1.3}
    return {"linestyle": "--" if name in records.domains else "-", "marker": "o", "markersize": 4, "linewidth": 1.3}


# --------------------------------------------------------------------------------------------------------- over speed
LABEL = 24  # characters in a line of a label
TO_THE_LOWER_RIGHT = "Gap against training speed: better is to the lower right"


def gap_over_speed(path: str | Path, records: Records, compared: Compared | None = None) -> None:
    """Draw every model's gap to the first reference over its training speed, one panel per condition.

    The first panel has the logged speeds of the runs, the others the study's `speeds`. Without any gap, the OOD
    differences at equal tokens are drawn. Writes a PNG at `path`, and an SVG next to it.
    """
    reference, rows = next(iter((compared or leaderboard.compared(records)).items()))
    values = {reference: Estimate(0.0)} | leaderboard.shown(rows)
    given = {"training speed of these runs (tokens/s)": run_speeds(records)} | records.speeds
    speeds = {what: of_model for what, of_model in given.items() if values.keys() & of_model.keys()}
    looks = {name: style(i) | {"linestyle": "none", "markersize": 6} for i, name in enumerate(records.models)}
    shown = [name for name in values if name in looks and any(name in of_model for of_model in speeds.values())]
    shown = sorted(shown, key=lambda name: values[name].value)
    numbers = _numbers(shown, NAMED)
    # More names need more room.
    widths = [max(1.0, math.sqrt(len(values.keys() & of_model.keys()) / NAMED)) for of_model in speeds.values()]
    figure = Figure(figsize=(9.6, max(4.6, 0.2 * len(numbers) + 0.8)), layout="constrained")
    axes = figure.subplots(1, len(speeds), squeeze=False, sharey=True, width_ratios=widths)[0]
    named: dict[Axes, dict[str, Named]] = {}
    for panel, (what, of_model) in zip(axes, speeds.items(), strict=True):
        names = [name for name in shown if name in of_model]
        panel.axhline(0, color="0.6", linewidth=1)
        for name in names:
            panel.errorbar(of_model[name], values[name].value, yerr=values[name].half, elinewidth=1, **looks[name])
        _set_speeds(panel, [of_model[name] for name in names])
        panel.set_xlabel(wrapped(what if "tokens/s" in what else f"{what} (tokens/s)", LABEL))
        named[panel] = {
            numbers.get(name, name): Named([(of_model[name], values[name].value)], looks[name]["color"])
            for name in names
        }
    axes[0].set_ylabel(f"{leaderboard.what_is_shown(rows, reference)}\n({records.unit.name}; {BETTER})")
    figure.suptitle(f"{records.title}\n{TO_THE_LOWER_RIGHT}", x=0.01, ha="left", fontsize=11)
    _add_names(axes[0], numbers, looks)
    label_points(named)
    save(figure, path)


def run_speeds(records: Records) -> dict[str, float]:
    """Return the tokens/s of the runs that represent every model; models of unknown speed are left out."""
    found = {name: gaps.shown_runs(records, name) for name in records.models}
    return {
        name: float(np.median([run.metadata["tokens_per_s"] for run in runs]))
        for name, runs in found.items()
        if all(run.metadata.get("tokens_per_s") for run in runs)
    }


def _set_speeds(panel: Axes, speeds: Sequence[float]) -> None:
    """Give a panel a logarithmic axis of speeds with round ticks."""
    panel.set_xscale("log")
    clean(panel)
    low, high = min(speeds) / 1.3, max(speeds) * 1.3
    panel.set_xlim(low, high)
    panel.margins(y=0.08)
    ticks = log_ticks(low, high)
    panel.set_xticks(ticks, [f"{tick / 1000:g}k" if tick >= 1000 else f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
