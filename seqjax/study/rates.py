"""The picture of the end points: the loss out of domain over the loss in domain, by learning rate.

Where a line runs along those of the references, the rate moves a model on the road that all take; where models keep
apart at every rate, it is not the rate that parts them.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from seqjax.study import comparison
from seqjax.study.figures import END_POINTS, END_POINTS_LABEL, save, style
from seqjax.study.records import Records

SIZE = 5.5  # of the marker of the common learning rate, in points


def end_points(path: str | Path, records: Records) -> None:
    """Draw every model's end point, or a line through those of its learning rates; a larger marker is a higher rate.

    The stars on dotted lines are the end points of the references' shorter schedules. Values are means over seeds, and
    over domains that count the same. In domain is what runs are compared at.
    """
    names = comparison.models(records)
    figure = Figure(figsize=(8.6, 5), layout="constrained")
    panel = figure.subplots()
    handles = []
    for i, name in enumerate(names):
        ends = comparison.by_rate(records, name)
        if not ends:
            continue
        look = style(i)
        panel.plot(*np.array(list(ends.values())).T, **look | {"marker": "", "linewidth": 1.1})
        for rate, (inside, outside) in ends.items():
            panel.plot(inside, outside, **look | {"linestyle": "none", "markersize": SIZE * rate**0.35})
        handles += panel.plot([], [], label=name, **look)
        if name in records.references and records.protocol == 1:
            shorter = np.array(list(comparison.by_schedule(records, name).values()))
            panel.plot(*shorter.T, **END_POINTS | {"color": look["color"]})
    if any(run.schedule != 1 for run in records.runs):
        handles += panel.plot([], [], label=END_POINTS_LABEL, **END_POINTS)
    panel.invert_xaxis()  # As in the picture of the losses: better is to the right.
    panel.set_xlabel(f"{comparison.x_label(records)}, at the end")
    panel.set_ylabel(f"{comparison.main_quantity(records)}, out of domain ({records.unit.name})")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="0.93")
    panel.set_axisbelow(True)
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside right center", handlelength=3.2)
    figure.suptitle(
        f"{records.title}\nend points; larger markers: higher learning rates", x=0.01, ha="left", fontsize=11
    )
    save(figure, path)
