"""Draw one point per model or rate: rates.png, sweep.png and cost.png.

rates.png shows last losses by learning rate. It tells whether the learning rate explains a difference: a model's line
then follows the reference's line. sweep.png shows gaps over a setting, and the attention entropy if runs measured it
(`eval.entropy_tokens`). cost.png shows gaps over speed: a panel for the logged speed and a panel per table in `speeds`.
With many models, points have numbers in gap order, and a legend has the names.
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

SIZE = 5.5  # marker size for rate 1, in points
NAMED = 12  # up to this many models, a panel has names at its points; more models have numbers, which need less room


def by_rate(path: str | Path, records: Records) -> None:
    """Draw each model's last losses at its learning rates, as a line.

    Larger markers are higher rates. Values are means over seeds and domains. The PNG is written to `path`, and an SVG
    next to it.
    """
    by_model = {name: gaps.rates(records, name).by_rate for name in records.models}
    by_height = sorted(by_model, key=lambda name: min(outside for _, _, outside in by_model[name].values()))
    numbers = _numbers(by_height, 2 * NAMED)
    figure = Figure(figsize=(9.6 if numbers else 8.6, 6.4), layout="constrained")
    panel = figure.subplots()
    labels: dict[str, Named] = {}
    looks = {name: style(i) for i, name in enumerate(records.models)}
    for name, look in looks.items():
        ends = {rate: (inside, outside) for rate, (_, inside, outside) in by_model[name].items()}
        panel.plot(*np.array(list(ends.values())).T, **look | {"marker": "", "linewidth": 1.1})
        for rate, (inside, outside) in ends.items():
            panel.plot(inside, outside, **look | {"linestyle": "none", "markersize": SIZE * rate**0.35})
        # The name is at the point that is best in domain, or at a later point if there is no room.
        labels[numbers.get(name, name)] = Named(sorted(ends.values()), look["color"])
    panel.margins(0.08)
    panel.set_xlabel(f"{records.in_domain_name}, last ({records.unit.name}; {BETTER})")
    panel.set_ylabel(f"{records.quantities[0]} loss, last ({records.unit.name}; {BETTER})")
    clean(panel)
    about = "Last losses at each learning rate; larger markers: higher rates"
    figure.suptitle(f"{records.title}\n{about}", x=0.01, ha="left", fontsize=11)
    _add_names(panel, numbers, looks)
    label_points({panel: labels})
    save(figure, path)


def _numbers(names: Sequence[str], most: int) -> dict[str, str]:
    """Return each model's number, from the bottom of a panel.

    The result is {} for at most `most` models.
    """
    return {name: str(i) for i, name in enumerate(names, start=1)} if len(names) > most else {}


def _add_names(panel: Axes, numbers: Mapping[str, str], looks: Mapping[str, Mapping[str, Any]]) -> None:
    """Add a legend with the numbered models, in the panels' order from the top."""
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
    """Draw the gap to the first reference over `records.sweep`.

    A second panel shows the attention entropy, if it was measured. Lines are domains; OOD domains are dashed. Without
    any gap, differences at equal tokens are drawn. A model is left out if its setting is not a number, such as an unset
    window. The PNG is written to `path`, and an SVG next to it.
    """
    values = setting_values(records)
    reference, rows = next(iter((compared or leaderboard.compared(records)).items()))
    rows = sorted((row for row in rows if row.model in values), key=lambda row: values[row.model])
    domains = {domain: COLORS[i % len(COLORS)] for i, domain in enumerate((*records.against, *records.domains))}
    entropies = {model: attention_entropy(gaps.shown_runs(records, model)) for model in values}
    n_panels = 2 if any(entropies.values()) else 1
    figure = Figure(figsize=(3.9 * n_panels + 1.8, 4.2), layout="constrained")
    axes = figure.subplots(1, n_panels, squeeze=False)[0]
    axes[0].axhline(0, color="0.6", linewidth=1)
    for name, estimates in _estimates_by_line(records, rows).items():
        x = [values[model] for model in estimates]
        look = _look(records, name) | {"color": domains.get(name, "0.3" if name == MEAN else "0.6")}
        widths = [estimate.half or 0.0 for estimate in estimates.values()] if name not in domains else []
        y = [estimate.value for estimate in estimates.values()]
        axes[0].errorbar(x, y, yerr=widths if any(widths) else None, elinewidth=1, label=name, **look)
    value_name = leaderboard.shown_name(rows, reference).removeprefix("OOD ")
    axes[0].set_ylabel(f"{value_name}\n({records.unit.name})")
    if n_panels > 1:
        for domain, color in domains.items():
            points = [(values[model], entropy[domain]) for model, entropy in entropies.items() if domain in entropy]
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


def setting_values(records: Records) -> dict[str, float]:
    """Return each model's `records.sweep` value, if it is a positive number."""
    values = {}
    for model in records.models:
        value: Any = gaps.shown_runs(records, model)[0].metadata.get("config")
        for key in records.sweep.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float) and math.isfinite(value) and value > 0:
            values[model] = float(value)
    return values


def attention_entropy(runs: Sequence[Record]) -> dict[str, float]:
    """Return a model's mean attention entropy per domain, in nats; {} if not measured."""
    measured = [run.metadata["entropy"] for run in runs if run.metadata.get("entropy")]
    domains = measured[0] if measured else {}
    return {domain: sum(entropy[domain]["entropy"] for entropy in measured) / len(measured) for domain in domains}


def _estimates_by_line(records: Records, rows: Sequence[Row]) -> dict[str, dict[str, Estimate]]:
    """Return the drawn values, line name -> model -> estimate."""
    if any(row.gap is not None for row in rows):
        return {name: {r.model: r.gaps[name] for r in rows if name in r.gaps} for name in records.quantities}
    differences = {row.model: row.at_equal_tokens for row in rows if row.at_equal_tokens is not None}
    return {MEAN: {model: difference.outside for model, difference in differences.items()}} | {
        "in domain": {model: difference.inside for model, difference in differences.items()}
    }


def _look(records: Records, name: str) -> dict[str, Any]:
    if name == MEAN:
        return {"linestyle": "-", "marker": "s", "markersize": 5, "linewidth": 1.3}
    return {"linestyle": "--" if name in records.domains else "-", "marker": "o", "markersize": 4, "linewidth": 1.3}


# --------------------------------------------------------------------------------------------------------- over speed
LABEL = 24  # characters in a line of a label
TO_THE_LOWER_RIGHT = "Gap against training speed: better is to the lower right"


def gap_over_speed(path: str | Path, records: Records, compared: Compared | None = None) -> None:
    """Draw every model's gap to the first reference over its training speed.

    The first panel has the runs' logged speeds, the other panels have the study's `speeds`. Without any gap, OOD
    differences at equal tokens are drawn. The PNG is written to `path`, and an SVG next to it.
    """
    reference, rows = next(iter((compared or leaderboard.compared(records)).items()))
    values = {reference: Estimate(0.0)} | leaderboard.shown(rows)
    tables = {"training speed of these runs (tokens/s)": run_speeds(records)} | records.speeds
    speeds = {condition: table for condition, table in tables.items() if values.keys() & table.keys()}
    looks = {name: style(i) | {"linestyle": "none", "markersize": 6} for i, name in enumerate(records.models)}
    shown = [name for name in values if name in looks and any(name in table for table in speeds.values())]
    shown = sorted(shown, key=lambda name: values[name].value)
    numbers = _numbers(shown, NAMED)
    # More names need more room.
    widths = [max(1.0, math.sqrt(len(values.keys() & table.keys()) / NAMED)) for table in speeds.values()]
    figure = Figure(figsize=(9.6, max(4.6, 0.2 * len(numbers) + 0.8)), layout="constrained")
    axes = figure.subplots(1, len(speeds), squeeze=False, sharey=True, width_ratios=widths)[0]
    labels: dict[Axes, dict[str, Named]] = {}
    for panel, (condition, table) in zip(axes, speeds.items(), strict=True):
        names = [name for name in shown if name in table]
        panel.axhline(0, color="0.6", linewidth=1)
        for name in names:
            panel.errorbar(table[name], values[name].value, yerr=values[name].half, elinewidth=1, **looks[name])
        _set_speeds(panel, [table[name] for name in names])
        panel.set_xlabel(wrapped(condition if "tokens/s" in condition else f"{condition} (tokens/s)", LABEL))
        labels[panel] = {
            numbers.get(name, name): Named([(table[name], values[name].value)], looks[name]["color"]) for name in names
        }
    quantity = wrapped(leaderboard.shown_name(rows, reference), 30)
    axes[0].set_ylabel(f"{quantity}\n({records.unit.name}; {BETTER})")
    figure.suptitle(f"{records.title}\n{TO_THE_LOWER_RIGHT}", x=0.01, ha="left", fontsize=11)
    _add_names(axes[0], numbers, looks)
    label_points(labels)
    save(figure, path)


def run_speeds(records: Records) -> dict[str, float]:
    """Return the median tokens/s of each model's shown runs, without unknown speeds."""
    runs_by_model = {name: gaps.shown_runs(records, name) for name in records.models}
    return {
        name: float(np.median([run.metadata["tokens_per_s"] for run in runs]))
        for name, runs in runs_by_model.items()
        if all(run.metadata.get("tokens_per_s") for run in runs)
    }


def _set_speeds(panel: Axes, speeds: Sequence[float]) -> None:
    """Give a panel a logarithmic speed axis with round ticks."""
    panel.set_xscale("log")
    clean(panel)
    low, high = min(speeds) / 1.3, max(speeds) * 1.3
    panel.set_xlim(low, high)
    panel.margins(y=0.08)
    ticks = log_ticks(low, high)
    panel.set_xticks(ticks, [f"{tick / 1000:g}k" if tick >= 1000 else f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
