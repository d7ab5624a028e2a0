"""Define `Record`, a run's data, and `Records`, a study's data, for all statistics and pages."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Unit(NamedTuple):
    """Hold a loss unit: the evaluation field with losses in this unit, its name, and the scale of thresholds."""

    field: str
    name: str
    scale: float  # only for thresholds: one in nats times this factor is the threshold in this unit


# A token has about four bytes: 1 nat per token is about 1 / (4 ln 2) = 0.36 bits per byte, rounded to a third.
UNITS = {"nats": Unit("loss", "nats per token", 1.0), "bits_per_byte": Unit("bits_per_byte", "bits per byte", 1 / 3)}
NATS = UNITS["nats"]


# `speeds` in study files and runs.json: condition -> tokens/s by model, with or without the card and sequence length.
SPEEDS = {str: ({"card": str, "length": int, "tokens_per_s": {str: float}}, {str: float})}


def speed_tables(tables: dict[str, Any]) -> tuple[dict[str, dict[str, float]], dict[str, tuple[str, int]]]:
    """Return tokens/s by condition and model, and each condition's card and length.

    The second dict has only the conditions that state a card and a length.
    """
    detailed = {condition: table for condition, table in tables.items() if "tokens_per_s" in table}
    speeds = {
        condition: table["tokens_per_s"] if condition in detailed else table for condition, table in tables.items()
    }
    return speeds, {condition: (table["card"], table["length"]) for condition, table in detailed.items()}


class Point(NamedTuple):
    """Hold an evaluation: each domain's loss, and the recorded OOD means.

    `row` is the evaluation's index in `Blocks.losses`; -1 before the study is written.
    """

    step: int
    tokens: int
    train_loss: float
    domains: dict[str, float]
    means: dict[str, float]
    row: int = -1


@dataclasses.dataclass(frozen=True)
class Record:
    """Hold a run's evaluations and its position in the study.

    Args:
        label: Run name.
        model: Architecture name.
        seed: Seed for the parameters and the data order.
        rate: Learning rate as a multiple of the study's common rate.
        schedule: Number of steps as a share of the full number; 1 in `Records`, which merges shorter runs into `ends`.
        points: Evaluations during the run, in order.
        ends: Evaluations with a decayed learning rate, by tokens. A WSD run has several ends. A linear-schedule run has
            its last evaluation, and the last evaluations of shorter runs that differ only in `schedule`.
        metadata: Values from runs.json, such as config and speed.
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
        """Whether the run has a WSD schedule, so all its points are ends."""
        return bool(self.metadata.get("config", {}).get("train", {}).get("ends"))


def in_domain(points: Sequence[Point], against: Sequence[str]) -> np.ndarray:
    """Return the in-domain loss at each point, [points].

    It is the mean over `against`, or the training loss if `against` is empty.
    """
    if not against:
        return np.array([p.train_loss for p in points])
    return np.array([np.mean([p.domains[domain] for domain in against]) for p in points])


def losses(points: Sequence[Point], domains: Sequence[str]) -> np.ndarray:
    """Return the losses at each point, [points, domains]."""
    return np.array([[p.domains[domain] for domain in domains] for p in points])


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Hold every evaluated block's loss, per domain.

    Args:
        units: Each block's sampling unit, [blocks]: its source if the domain's sources are known, else its document.
        losses: [evaluations, blocks]; NaN for an omitted evaluation.
    """

    units: dict[str, np.ndarray]
    losses: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, so that results can be cached
class Records:
    """Hold a study's data.

    Args:
        title: Title for tables and pictures.
        references: Models that gaps refer to.
        domains: Out-of-domain (OOD) test domains.
        against: Domains that define the in-domain loss, as their mean held-out loss; () means the training loss.
        runs: Runs with results.
        missing: Label -> reason, for runs without results.
        blocks: Block losses, if they were kept.
        speeds: Condition -> model -> tokens/s, measured with the same kernels on one card.
        conditions: Condition -> card and sequence length, where the study states them.
        unit: Loss unit.
        sweep: The setting that the study varies.
        asks: Models in the main test family; () means all models except the references.
        remarks: Sentences about limits of the data.
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
        """The models, in study order."""
        return list(dict.fromkeys(run.model for run in self.runs))

    def of_model(self, model: str) -> list[Record]:
        """Return a model's runs."""
        return [run for run in self.runs if run.model == model]

    @functools.cached_property
    def unit_rate(self) -> float | None:
        """The learning rate for `rate` = 1, if the configs agree on it; else None."""
        pairs = ((run.metadata.get("config", {}).get("optim", {}).get("lr"), run.rate) for run in self.runs)
        rates = {float(f"{lr / rate:.6g}") for lr, rate in pairs if lr}
        return rates.pop() if len(rates) == 1 else None

    def rate_text(self, rate: float) -> str:
        """Return a rate as a learning rate, "0.002", or as a multiple, "x2".

        The multiple is used if `unit_rate` is unknown.
        """
        return f"x{rate:g}" if self.unit_rate is None else f"{float(f'{rate * self.unit_rate:.3g}'):g}"

    @property
    def in_domain_name(self) -> str:
        """The in-domain loss's name."""
        return f"mean held-out loss of {', '.join(self.against)}" if self.against else "training loss"

    @property
    def quantities(self) -> tuple[str, ...]:
        """The OOD losses with gaps: the mean, then each domain.

        With a single domain there is only this domain.
        """
        return (MEAN, *self.domains) if len(self.domains) > 1 else tuple(self.domains)


MEAN = "OOD mean"
