"""Compare architectures by the gap between their out-of-domain losses at the same in-domain loss.

A lower out-of-domain loss may only mean that a model has learned its training set better. The protocol (arXiv
2505.18522) therefore compares models at the same in-domain loss, regardless of the number of tokens each needed.

Evaluations lie at different losses in different runs, so a run's loss at a given one is interpolated linearly between
its evaluations, and never extrapolated. Interpolation and the mean over a range are linear in the losses of the
evaluations. A gap is thus a weighted sum of them (`Contrast`), and the same weights give the gap of a domain, a
document or a block. docs/protocol.md has the formulas.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqjax.reading import Float, check
from seqjax.training import metrics
from seqjax.training.workdir import readable
from seqjax.utils import UserError

MEANS = ("equal", "natural")  # over the domains out of distribution: each the same, or by its share in the corpus


class Unit(NamedTuple):
    """A unit of losses: the field of an evaluation, its name, and the range over which gaps are averaged."""

    field: str
    name: str
    range: float  # of the lowest losses in domain that two runs share


# Bits per byte are comparable across tokenizers; 0.3 nats of a token of four bytes are about 0.1 bits per byte.
UNITS = {
    "nats": Unit("loss", "nats per token", 0.3),
    "bits_per_byte": Unit("bits_per_byte", "bits per byte", 0.1),
}
NATS = UNITS["nats"]


class Point(NamedTuple):
    """One evaluation of a run: the loss of every domain, and the means out of domain that the run recorded."""

    step: int
    tokens: int
    train_loss: float
    domains: dict[str, float]
    means: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Record:
    """The evaluations of a run and its place in the study; `metadata` holds its config, speed and other values.

    `model` names the architecture, `rate` is the learning rate as a multiple of the common one, and `schedule` the
    number of steps as a share of the full number.
    """

    label: str
    model: str
    seed: int
    rate: float
    schedule: float
    points: list[Point]
    metadata: dict[str, Any]

    def losses_in_domain(self, against: Sequence[str]) -> np.ndarray:
        """Return the loss at which it is compared, [evaluations]: the mean of `against`, or the training loss."""
        if not against:
            return np.array([p.train_loss for p in self.points])
        return np.array([np.mean([p.domains[domain] for domain in against]) for p in self.points])

    def losses(self, domains: Sequence[str]) -> np.ndarray:
        """Return the losses [evaluations, domains]."""
        return np.array([[p.domains[domain] for domain in domains] for p in self.points])


class Contrast(NamedTuple):
    """A gap as weights on evaluations: per seed, runs with a weight for each of their evaluations.

    `low` and `high` are the in-domain losses between which it is taken; they are equal for a gap at one loss. `slopes`
    are weights in the same form for the change of an interpolated run's loss per nat in domain. They give the effect of
    errors in the matched in-domain losses on the gap.
    """

    low: float
    high: float
    seeds: list[list[tuple[Record, np.ndarray]]]
    slopes: list[list[tuple[Record, np.ndarray]]]

    def gaps(self, domains: Sequence[str]) -> np.ndarray:
        """Return the gap of every seed and domain, [seeds, domains], in the unit of the losses; positive is worse."""
        return _weigh(self.seeds, domains)

    def slope(self, domains: Sequence[str]) -> np.ndarray:
        """Return the slope per domain, [domains], the mean over seeds."""
        return _weigh(self.slopes, domains).mean(0)


def _weigh(seeds: Sequence[Sequence[tuple[Record, np.ndarray]]], domains: Sequence[str]) -> np.ndarray:
    """Return the weighted sum of losses of every seed, [seeds, domains]."""
    sums = np.zeros((len(seeds), len(domains)))
    for of_seed, weighted in zip(sums, seeds, strict=True):
        for run, weights in weighted:
            of_seed += weights @ run.losses(domains)
    return sums


def read_points(workdir: str | Path, *, unit: Unit = NATS) -> list[Point]:
    """Return the evaluations of a run so far, in order, with the domain losses in `unit`.

    The training loss and the recorded means are in nats per token; in another unit there are no means.

    `train_loss` is the mean over the steps since the previous evaluation. For a model that learns fast it lags behind
    the domain losses, which belong to the last of those steps; held-out losses have no such lag.

    Raises `UserError` if `workdir` is not a run or has no evaluation yet.
    """
    if not (readable(workdir) / "metrics.jsonl").exists():
        raise UserError(f"{workdir} is not a run: it has no metrics.jsonl.")
    points = []
    for row in metrics.read(workdir):
        losses = {key: float(value) for key, value in row.items() if re.fullmatch(f"eval/[^/]+/{unit.field}", key)}
        if losses:
            check(row, {"tokens": int, "train/loss": Float}, f"{workdir}/metrics.jsonl, step {row['step']}")
            domains = {key.split("/")[1]: value for key, value in losses.items()}
            names = MEANS if unit == NATS else ()
            recorded = {name: row.get(f"eval_mean/out_of_domain/{name}") for name in names}
            means = {name: float(value) for name, value in recorded.items() if value is not None}
            points.append(Point(row["step"], row["tokens"], float(row["train/loss"]), domains, means))
    if not points:
        raise UserError(f"{workdir} has no evaluation yet; let it reach its first (config.eval.every).")
    return points


def weights_at(x: np.ndarray, at: float) -> np.ndarray | None:
    """Return the weights [n] that interpolate values known at `x` [n] linearly at `at`; None outside their range.

    Values at equal `x` count as their mean.
    """
    unique, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    if not unique[0] <= at <= unique[-1]:
        return None
    right = min(int(np.searchsorted(unique, at)), len(unique) - 1)
    left = max(right - 1, 0)
    of_unique = np.zeros(len(unique))
    share = (at - unique[left]) / (unique[right] - unique[left]) if right > left else 1.0
    of_unique[left] += 1 - share
    of_unique[right] += share
    return of_unique[inverse] / counts[inverse]


def weights_over(x: np.ndarray, low: float, high: float) -> np.ndarray | None:
    """Return the weights [n] that give the mean over [low, high] of the lines between values known at `x` [n].

    The integral of the lines is exact. None if the range is not within that of `x`.
    """
    ends = weights_at(x, low), weights_at(x, high)
    if ends[0] is None or ends[1] is None:
        return None
    if low == high:
        return ends[0]
    knots = np.unique([low, high, *x[(x > low) & (x < high)]])
    widths = np.diff(knots)
    of_knots = np.concatenate([widths, [0.0]]) / 2 + np.concatenate([[0.0], widths]) / 2
    total = np.zeros(len(x))
    for share, knot in zip(of_knots, knots, strict=True):
        of_knot = weights_at(x, float(knot))
        assert of_knot is not None, "every knot is within the range of x"
        total += share * of_knot
    return total / (high - low)


def slope_weights(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return the weights [n] that give the mean slope over [low, high] of the lines between values known at `x` [n].

    At one point, the slope is that of the line through it; for a single `x` it is zero.
    """
    if low == high:
        unique = np.unique(x)
        if len(unique) == 1:
            return np.zeros(len(x))
        right = min(max(int(np.searchsorted(unique, low)), 1), len(unique) - 1)
        low, high = unique[right - 1], unique[right]
    ends = weights_at(x, low), weights_at(x, high)
    assert ends[0] is not None and ends[1] is not None, "the range is within that of x"
    return (ends[1] - ends[0]) / (high - low)


def pairs(runs: Sequence[Record], references: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the runs of two models that share a seed: the same blocks in the same order and the same initial draws."""
    of_seed = {run.seed: run for run in references}
    return [(run, of_seed[run.seed]) for run in runs if run.seed in of_seed]


def common_range(both: Sequence[tuple[Record, Record]], against: Sequence[str]) -> tuple[float, float] | None:
    """Return the lowest and highest in-domain loss that all of these runs passed through; None if there is none."""
    losses = [run.losses_in_domain(against) for pair in both for run in pair]
    if not losses:
        return None
    low, high = max(float(x.min()) for x in losses), min(float(x.max()) for x in losses)
    return (low, high) if low <= high else None


def gap_at_lowest(both: Sequence[tuple[Record, Record]], against: Sequence[str]) -> Contrast | None:
    """Return the gap of each pair's first run to its second at the lowest in-domain loss that all of them share."""
    shared = common_range(both, against)
    return None if shared is None else _between(both, against, shared[0], shared[0])


def gap_over_range(
    both: Sequence[tuple[Record, Record]], against: Sequence[str], *, width: float = NATS.range
) -> Contrast | None:
    """Return the gap averaged over the lowest `width` of the in-domain losses that all of the runs share."""
    shared = common_range(both, against)
    return None if shared is None else _between(both, against, shared[0], min(shared[1], shared[0] + width))


def _between(both: Sequence[tuple[Record, Record]], against: Sequence[str], low: float, high: float) -> Contrast:
    seeds, slopes = [], []
    for pair in both:
        of_pair = [weights_over(run.losses_in_domain(against), low, high) for run in pair]
        assert of_pair[0] is not None and of_pair[1] is not None, "the range is common to all"
        seeds.append([(pair[0], of_pair[0]), (pair[1], -of_pair[1])])
        # A run at its own end is not interpolated: an error in its in-domain loss moves along the other's line.
        moved = [run for run in pair if low < high or run.losses_in_domain(against).min() < low] or pair
        slopes.append([(run, slope_weights(run.losses_in_domain(against), low, high) / len(moved)) for run in moved])
    return Contrast(low, high, seeds, slopes)


def gap_to_end_points(
    runs: Sequence[Record], schedules: Sequence[Record], against: Sequence[str], *, model: str
) -> Contrast | None:
    """Return the gap of the runs' last evaluations to the line through the last ones of `model`'s schedules.

    Each of these points is reached with a decayed learning rate. Seeds with only one schedule are left out. None if no
    seed is left, or if a run's in-domain loss is not between those of the schedules.
    """
    seeds, slopes, at = [], [], []
    for run in runs:
        ended = [s for s in schedules if s.model == model and s.seed == run.seed]
        if len(ended) < 2:
            continue
        loss = float(run.losses_in_domain(against)[-1])
        ends = np.array([s.losses_in_domain(against)[-1] for s in ended])
        weights = weights_at(ends, loss)
        if weights is None:
            return None
        of_slope = slope_weights(ends, loss, loss)
        lasts = [(s, -w * _last(s)) for s, w in zip(ended, weights, strict=True)]
        seeds.append([(run, _last(run)), *lasts])
        slopes.append([(s, w * _last(s)) for s, w in zip(ended, of_slope, strict=True)])
        at.append(loss)
    return Contrast(min(at), max(at), seeds, slopes) if seeds else None


def _last(run: Record) -> np.ndarray:
    weights = np.zeros(len(run.points))
    weights[-1] = 1.0
    return weights


def best_rate(runs: Sequence[Record], against: Sequence[str]) -> list[Record]:
    """Return the runs, of one model, at the learning rate with the lowest mean in-domain loss at the end."""
    of_rate: dict[float, list[Record]] = {}
    for run in runs:
        of_rate.setdefault(run.rate, []).append(run)

    def at_end(group: list[Record]) -> float:
        return float(np.mean([run.losses_in_domain(against)[-1] for run in group]))

    return min(of_rate.values(), key=at_end, default=[])


def natural_shares(runs: Sequence[Record], domains: Sequence[str]) -> np.ndarray | None:
    """Return the weights [domains] of the natural mean that the runs recorded; None if it is no mean of `domains`.

    Evaluations record the mean, not its weights; these follow from the evaluations, of which there are far more.
    """
    points = [p for run in runs for p in run.points]
    if not points or any("natural" not in p.means for p in points):
        return None
    losses = np.array([[p.domains[domain] for domain in domains] for p in points])
    means = np.array([p.means["natural"] for p in points])
    # The weights sum to one: what is left after the last domain's loss depends on the other weights alone.
    apart = losses[:, :-1] - losses[:, -1:]
    rest, _, _, singular = np.linalg.lstsq(apart, means - losses[:, -1])
    weights = np.append(rest, 1 - rest.sum())
    # Losses are known to 1e-6: domains that hardly differ in any evaluation would leave the weights open.
    determined = len(singular) == len(domains) - 1 and (singular > 0.01).all()
    fits = np.abs(losses @ weights - means).max() < 1e-4
    return weights if determined and fits and weights.min() > -1e-3 else None
