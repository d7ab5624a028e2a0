"""Write lab/results/switches/parts.md and .png: effects of block parts.

    python -m lab.pages.parts

Five models in lab/results/switches are compared with versions that have one part more or one part less. Positive
numbers mean a lower loss with the part.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqjax import presets
from seqjax.study import gaps
from seqjax.study.report import figures
from seqjax.study.report.tables import DASH, markdown
from seqjax.study.runs import files
from seqjax.study.runs.record import Records

HERE = Path(__file__).parents[1] / "results" / "switches"
OTHERS = HERE.parent / "trunks_110m"  # has models with several learning rates, for the rate slope
PARTS = ("conv", "token shift", "gate", "Canon A", "Canon ACD")
REFERENCE = "Transformer++, QK norm, conv"
APART = "*"


class Part(NamedTuple):
    """The effect of a part on one model, in nats per token.

    It is positive if the loss is lower with the part.

    Attributes:
        equal_loss: Gap between the models with and without the part; None if it cannot be computed.
        through: Difference of the two models' gaps to REFERENCE.
        outside: Difference in OOD loss at equal tokens.
        inside: Difference in in-domain loss at equal tokens.
        losses: In-domain and OOD loss of the changed model.
    """

    equal_loss: float | None
    through: float
    outside: float
    inside: float
    losses: tuple[float, float]


class Model(NamedTuple):
    """A model's in-domain and OOD loss, and the effects of its parts."""

    losses: tuple[float, float]
    parts: dict[str, Part]


QUANTITIES: dict[str, Callable[[Part], tuple[float, str]]] = {
    "OOD, at equal in-domain loss": lambda part: (
        (part.through, APART) if part.equal_loss is None else (part.equal_loss, "")
    ),
    "OOD, at equal tokens": lambda part: (part.outside, ""),
    "in domain, at equal tokens": lambda part: (part.inside, ""),
}


def read() -> dict[str, Model]:
    """Return the effects of all parts, by model."""
    models, study = presets.load("studies/switches").MODELS, files.read(HERE)
    estimates = gaps.estimates(_joined(study), REFERENCE)
    to_reference = {REFERENCE: 0.0} | {name: gap.value for name, gap in estimates.items()}
    effects = {}
    for model, variants in models.items():
        rows = {row.model: row for row in gaps.compare(study, model)}
        labels = {label.removeprefix("no "): f"{model}, {label}" for label in variants}
        if (own := f"{model}, conv") in rows:  # the study's second reference
            labels["conv"] = own
        parts = {}
        for part, label in labels.items():
            row, sign = rows[label], 1 if ", no " in label else -1
            assert row.at_equal_tokens is not None, f"{label} and {model} read different tokens"
            inside, outside = (sign * difference.value for difference in row.at_equal_tokens)
            at_equal_loss = None if row.gap is None else sign * row.gap.value
            through = sign * (to_reference[label] - to_reference[model])
            parts[part] = Part(at_equal_loss, through, outside, inside, _losses(study, label))
        effects[model] = Model(_losses(study, model), parts)
    return effects


def _joined(study: Records) -> Records:
    """Return the study with the additional models in OTHERS.

    They allow comparing models at different learning rates.
    """
    more = [run for run in files.read(OTHERS).runs if run.model not in study.models]
    return dataclasses.replace(study, runs=[*study.runs, *more], blocks=None)


def _losses(study: Records, model: str) -> tuple[float, float]:
    rates = gaps.rates(study, model)
    _, inside, outside = rates.by_rate[rates.shown]
    return inside, outside


def page(models: dict[str, Model]) -> str:
    """Return the page: text and tables."""
    text = ["# Effect of each part of a block", (__doc__ or "").strip().split("\n\n")[-1].replace("\n", " ")]
    text.append(
        "Numbers are nats per token, with one seed each, at the model's best learning rate in trunks_110m. Attention "
        "with the convolution has a different best rate; the gap corrects for it. A dash marks a part that was not "
        "varied."
    )
    text += [_about_apart(models), "![effect of each part](parts.png)"]
    for title, quantity in QUANTITIES.items():
        text += [
            f"## Loss {title}",
            _table(models, lambda part, quantity=quantity: "{:+.3f}{}".format(*quantity(part))),
        ]
    as_it_is = {name: "{:.3f}, {:.3f}".format(*model.losses) for name, model in models.items()}
    text += [
        "## Losses in domain and OOD",
        "Gated DeltaNet and Mamba-2 have the convolution and gate by default; their columns show losses without it.",
    ]
    text.append(_table(models, lambda part: "{:.3f}, {:.3f}".format(*part.losses), as_it_is))
    return "\n\n".join(text) + "\n"


def _table(models: dict[str, Model], cell: Callable[[Part], str], as_it_is: dict[str, str] | None = None) -> str:
    lines = [
        [
            name,
            *([as_it_is[name]] if as_it_is else []),
            *(cell(parts[part]) if part in parts else DASH for part in PARTS),
        ]
        for name, (_, parts) in models.items()
    ]
    return markdown(["model", *(["as it is"] if as_it_is else []), *PARTS], lines).rstrip()


def _about_apart(models: dict[str, Model]) -> str:
    both = [
        abs(part.through - part.equal_loss)
        for model in models.values()
        for part in model.parts.values()
        if part.equal_loss is not None
    ]
    return (
        f"\\{APART} marks the difference between two gaps to {REFERENCE}. It is used if the model has a single end, or "
        f"another learning rate than the changed model. Where both numbers exist, they differ by up to {max(both):.3f}."
    )


def draw(models: dict[str, Model], path: Path) -> None:
    """Draw one panel per quantity."""
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    panels = figure.subplots(1, len(QUANTITIES), sharey=True)
    for panel, (title, quantity) in zip(panels, QUANTITIES.items(), strict=True):
        _draw(panel, models, quantity)
        panel.set_title(title, loc="left", fontsize=10)
    panels[0].set_xlabel(f"{APART} difference of two gaps to {REFERENCE}", fontsize=8, color="0.3", loc="left")
    figure.suptitle("How much lower the loss is with the part (nats per token)", x=0.01, ha="left", fontsize=11)
    figures.save(figure, path)


def _draw(panel: Axes, models: dict[str, Model], quantity: Callable[[Part], tuple[float, str]]) -> None:
    values = [[math.nan] * len(PARTS) for _ in models]
    for y, model in enumerate(models.values()):
        for name, part in model.parts.items():
            x, (value, mark) = PARTS.index(name), quantity(part)
            values[y][x] = value
            color = "w" if abs(value) > 0.25 else "0.3"
            panel.text(x, y, f"{value:+.3f}{mark}", ha="center", va="center", fontsize=8, color=color)
    panel.imshow(values, aspect="auto", cmap="RdBu", vmin=-0.5, vmax=0.5)
    panel.set_xticks(range(len(PARTS)), [part.replace(" ", "\n") for part in PARTS], fontsize=8.5)
    panel.set_yticks(range(len(models)), list(models), fontsize=8.5)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


if __name__ == "__main__":
    known = read()
    (HERE / "parts.md").write_text(page(known), encoding="utf-8")
    draw(known, HERE / "parts.png")
