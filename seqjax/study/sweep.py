"""The picture of a setting that a study varies: gap and entropy of attention over its values.

The entropy is in `runs.json` of runs that measured it (`eval.entropy_tokens`).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqjax.study import comparison
from seqjax.study.figures import save
from seqjax.study.protocol import Record
from seqjax.study.records import Records
from seqjax.training.report import COLORS


def over_setting(path: str | Path, records: Records) -> None:
    """Draw the gap to the first reference over `records.sweep`, and beside it the entropy where it was measured.

    Lines are domains, dashed where they are out of domain. A model whose setting is not a number, such as a window that
    is not set, is left out. Writes a PNG at `path`, and an SVG beside it.
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
        panel.set_xticks(sorted(set(values.values())), [f"{value:g}" for value in sorted(set(values.values()))])
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
            value: Any = run.facts.get("config")
            for key in records.sweep.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if isinstance(value, int | float) and math.isfinite(value) and value > 0:
                found[model] = float(value)
    return found


def entropy_of(runs: list[Record]) -> dict[str, float]:
    """Return the mean entropy per domain, in nats, over the runs of a model; empty if it was not measured."""
    measured = [run.facts["entropy"] for run in runs if run.facts.get("entropy")]
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
