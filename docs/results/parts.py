"""Write docs/results/switches/parts.md and .png, what each part of a block gives five models.

    python docs/results/parts.py

Every model is compared with itself without the part, or with it where the part is its own, by the study in
docs/results/switches. Positive is a lower loss with the part.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from seqjax import presets
from seqjax.study import comparison, equal_loss, figures, records
from seqjax.study.equal_loss import Measured, Row
from seqjax.study.tables import DASH, markdown

HERE = Path(__file__).parent / "switches"
NOT_RUN, NO_OVERLAP = "not run", "no overlap"
PARTS = ("conv", "token shift", "gate", "Canon A", "Canon ACD")
Gains = dict[str, dict[str, Row | None]]  # model -> part, of those that the study varies -> None if it has not run


def read() -> Gains:
    """Return the rows of each model's variants beside the model itself."""
    models = presets.load("studies/switches").MODELS
    study = dataclasses.replace(records.read(HERE), references=tuple(models))
    found: Gains = {}
    for model, variants in models.items():
        rows = {row.model: row for row in equal_loss.compare(study, model)}
        labels = {label.removeprefix("no "): f"{model}, {label}" for label in variants}
        if (own := f"{model}, conv") in rows:  # the second reference of the study
            labels["conv"] = own
        found[model] = {part: rows.get(labels[part]) for part in PARTS if part in labels}
    return found


def _equal_loss(row: Row) -> Measured | None:
    return None if row.gaps is None else row.gaps[comparison.EQUAL]


QUANTITIES: Mapping[str, Callable[[Row], Measured | None]] = {
    "outside, at equal loss in domain": _equal_loss,
    "outside, at equal tokens": lambda row: row.outside,
    "in domain, at equal tokens": lambda row: row.inside,
}


def gain(row: Row, measure: Callable[[Row], Measured | None]) -> float | None:
    """Return by how much the loss is lower with the part; None without overlap."""
    measured = measure(row)
    return None if measured is None else (measured.gap if ", no " in row.model else -measured.gap)


def cell(row: Row | None, measure: Callable[[Row], Measured | None]) -> str:
    """Return a gain as text."""
    if row is None:
        return NOT_RUN
    value = gain(row, measure)
    return NO_OVERLAP if value is None else f"{value:+.3f}"


def page(gains: Gains) -> str:
    """Return the tables."""
    text = ["# What each part of a block gives", (__doc__ or "").strip().split("\n\n")[-1].replace("\n", " ")]
    text.append(
        "Nats per token, one seed each, at the rate that is best for the model as it is in trunks_110m; attention with "
        "the convolution, which that study has, at its own best rate. A dash is a part that is not varied there."
    )
    text.append("![what each part gives](parts.png)")
    for title, measure in QUANTITIES.items():
        lines = [
            [model, *(cell(of[part], measure) if part in of else DASH for part in PARTS)] for model, of in gains.items()
        ]
        text += [f"## Loss {title}", markdown(["model", *PARTS], lines).rstrip()]
    return "\n\n".join(text) + "\n"


def draw(gains: Gains, path: Path) -> None:
    """Draw one panel for each quantity."""
    figure, panels = plt.subplots(1, len(QUANTITIES), figsize=(13, 3.2), layout="constrained", sharey=True)
    for panel, (title, measure) in zip(panels, QUANTITIES.items(), strict=True):
        _draw(panel, gains, measure)
        panel.set_title(title, loc="left", fontsize=10)
    figure.suptitle("How much lower the loss is with the part (nats per token)", x=0.01, ha="left", fontsize=11)
    figures.save(figure, path)


def _draw(panel: Axes, gains: Gains, measure: Callable[[Row], Measured | None]) -> None:
    values = [[math.nan] * len(PARTS) for _ in gains]
    for y, of in enumerate(gains.values()):
        for x, part in enumerate(PARTS):
            if part not in of:
                continue
            text, row = cell(of[part], measure), of[part]
            value = None if row is None else gain(row, measure)
            values[y][x] = math.nan if value is None else value
            color = "w" if value is not None and abs(value) > 0.25 else "0.3"
            panel.text(x, y, text.replace(" ", "\n"), ha="center", va="center", fontsize=8, color=color)
    panel.imshow(values, aspect="auto", cmap="RdBu", vmin=-0.5, vmax=0.5)
    panel.set_xticks(range(len(PARTS)), [part.replace(" ", "\n") for part in PARTS], fontsize=8.5)
    panel.set_yticks(range(len(gains)), list(gains), fontsize=8.5)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


if __name__ == "__main__":
    known = read()
    (HERE / "parts.md").write_text(page(known), encoding="utf-8")
    draw(known, HERE / "parts.png")
