"""The one record of a run, and the records of a study, which all statistics, tables and pictures read."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Unit(NamedTuple):
    """A unit of losses: the field of an evaluation, its name, and its size relative to nats per token."""

    field: str
    name: str
    scale: float  # thresholds that are stated in nats are multiplied by it


# A token has about four bytes: 1 nat per token is about 1 / (4 ln 2), a third of a bit per byte.
UNITS = {"nats": Unit("loss", "nats per token", 1.0), "bits_per_byte": Unit("bits_per_byte", "bits per byte", 1 / 3)}
NATS = UNITS["nats"]


# `speeds` of a study file and of runs.json: condition -> tokens/s by model, with the card and the sequence length or
# without them.
SPEEDS = {str: ({"card": str, "length": int, "tokens_per_s": {str: float}}, {str: float})}


def speed_tables(given: dict[str, Any]) -> tuple[dict[str, dict[str, float]], dict[str, tuple[str, int]]]:
    """Return tokens/s by condition and model, and the card and the length of the conditions that name them."""
    named = {what: of for what, of in given.items() if "tokens_per_s" in of}
    speeds = {what: of["tokens_per_s"] if what in named else of for what, of in given.items()}
    return speeds, {what: (of["card"], of["length"]) for what, of in named.items()}


class Point(NamedTuple):
    """One evaluation of a run: the loss of every domain, and the means out of domain that the run recorded.

    `row` is the index of the evaluation in `Blocks.losses`; -1 before the study is written.
    """

    step: int
    tokens: int
    train_loss: float
    domains: dict[str, float]
    means: dict[str, float]
    row: int = -1


@dataclasses.dataclass(frozen=True)
class Record:
    """The evaluations of a run and its place in the study; `metadata` has its config, speed and other values.

    Args:
        label: Name of the run.
        model: Name of the architecture.
        seed: Seed of the parameters and of the data order.
        rate: Learning rate as a multiple of the study's common one.
        schedule: Number of steps as a share of the full number. `Records` holds full runs only.
        points: Evaluations along the run, in order.
        ends: Evaluations with a decayed learning rate, by tokens: the ends of a WSD run, the last evaluation of a run
            with a linear schedule, and of shorter runs that differ in `schedule` only.
        metadata: Values of runs.json.
    """

    label: str
    model: str
    seed: int
    rate: float
    schedule: float
    points: list[Point]
    ends: list[Point]
    metadata: dict[str, Any]

    @property
    def last(self) -> Point:
        """The last end."""
        return self.ends[-1]

    @property
    def is_wsd(self) -> bool:
        """Whether the run has a warmup-stable-decay schedule, so that all of its points are ends."""
        return bool(self.metadata.get("config", {}).get("train", {}).get("ends"))


def in_domain(points: Sequence[Point], against: Sequence[str]) -> np.ndarray:
    """Return the in-domain loss of points, [points]: the mean over `against`, or the training loss without any."""
    if not against:
        return np.array([p.train_loss for p in points])
    return np.array([np.mean([p.domains[domain] for domain in against]) for p in points])


def losses(points: Sequence[Point], domains: Sequence[str]) -> np.ndarray:
    """Return the losses of points, [points, domains]."""
    return np.array([[p.domains[domain] for domain in domains] for p in points])


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The loss of every evaluated block, per domain.

    Args:
        units: [blocks], the sampling unit of each block: its source where the sources of a domain are known, else its
            document.
        losses: [evaluations, blocks]; NaN for an evaluation that was left out.
    """

    units: dict[str, np.ndarray]
    losses: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, so that results can be cached
class Records:
    """The data of a study.

    Args:
        title: Title of tables and pictures.
        references: Models that gaps refer to.
        domains: Out-of-domain (OOD) test domains.
        against: Domains whose mean held-out loss is the in-domain loss; () is the training loss.
        runs: Runs with results.
        missing: Label of each run without results -> reason.
        blocks: Losses of blocks, if they were kept.
        speeds: Condition -> model -> tokens/s, measured with the same kernels on one card.
        conditions: Condition -> card and sequence length of `speeds`, where the study names them.
        unit: Unit of the losses.
        sweep: Setting that the study varies.
        asks: Models that the study asks about, whose verdicts are one family; () is all but the references.
        remarks: Sentences about what the data cannot support.
        name: Name of the study's directory.
    """

    title: str
    references: tuple[str, ...]
    domains: tuple[str, ...]
    against: tuple[str, ...]
    runs: list[Record]
    missing: dict[str, str]
    blocks: Blocks | None
    speeds: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    conditions: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    unit: Unit = NATS
    sweep: str = ""
    asks: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    name: str = ""

    @functools.cached_property
    def models(self) -> list[str]:
        """The models, in the order of the study."""
        return list(dict.fromkeys(run.model for run in self.runs))

    def of_model(self, model: str) -> list[Record]:
        """Return the runs of a model."""
        return [run for run in self.runs if run.model == model]

    @functools.cached_property
    def unit_rate(self) -> float | None:
        """The learning rate of `rate` = 1, if the configs of the runs agree on it; else None."""
        pairs = ((run.metadata.get("config", {}).get("optim", {}).get("lr"), run.rate) for run in self.runs)
        found = {float(f"{lr / rate:.6g}") for lr, rate in pairs if lr}
        return found.pop() if len(found) == 1 else None

    def rate_text(self, rate: float) -> str:
        """Return a rate as a learning rate, such as "0.002", or as a multiple, "x2", if the unit is not known."""
        return f"x{rate:g}" if self.unit_rate is None else f"{float(f'{rate * self.unit_rate:.3g}'):g}"

    @property
    def in_domain_name(self) -> str:
        """The name of the in-domain loss."""
        return f"mean held-out loss of {', '.join(self.against)}" if self.against else "training loss"

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of the OOD losses that have gaps: their mean, then each domain; the only domain is the mean."""
        return (MEAN, *self.domains) if len(self.domains) > 1 else tuple(self.domains)


MEAN = "OOD mean"
