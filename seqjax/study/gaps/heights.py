"""Measure each model's gap to a reference at equal in-domain loss and learning rate.

Every run becomes one number, its height above the reference's loss curve. One slope, common to all models, adjusts for
the learning rate. A gap is the model's mean height over seeds, minus the reference's. An end is an evaluation of a run
with a decayed learning rate (`runs/record.py`), in the order of tokens. For an end, x is the in-domain loss, y the OOD
loss, and rho = log2(rate).

    h(x)   = b (x - x0) + q (x - x0)^2, fitted to all ends of the reference, with an intercept per run; the tangent
             continues it past the outermost ends
    u_i(x) height of run i: linear interpolation of y - h(x) between its ends, constant outside
    X      the reference's mean last x at its best rate
    x_i    = max(last x of run i, X): the loss at which run i is read; its highest end if all its ends lie below X
    c      mean over models: slope of heights on rho, between near-best rates of one seed
    R(x)   = mean over a reference seed's rates, then over its seeds: u_j(x) - c rho_j
    g_s    = mean over rates of seed s: u_i(x_i) - c rho_i - R(x_i);   g = mean over seeds: g_s

All functions have a leading axis D for draws (`documents.py`); the measured data is a single draw. Letters: D draws, E
ends, P positions where heights are read, Q quantities (the domain mean, then each domain), S seeds.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

REACH = (
    0.05  # nats in domain: the largest distance below X, or above the reference's highest end, of a run that is read
)
FEWEST = 3  # models with a slope; with fewer, there is no learning-rate adjustment
SAME = 1e-9  # octaves: the largest rounding difference between equal mean rates


class Ends(NamedTuple):
    """Hold a run's ends: in-domain x [D, E], OOD y [D, E, Q], and tokens [E]."""

    label: str
    seed: int
    rate: float
    x: np.ndarray
    y: np.ndarray
    tokens: np.ndarray

    @property
    def rho(self) -> float:
        """log2 of the learning rate."""
        return float(np.log2(self.rate))


class Curve(NamedTuple):
    """Hold a reference's curve h(x).

    The coefficients are [D, Q]. The centre x0, the lowest end and the highest end are [D].
    """

    linear: np.ndarray
    quadratic: np.ndarray
    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def at(self, x_DP: np.ndarray) -> np.ndarray:
        """Return h(x), [D, P, Q]."""
        inside = np.clip(x_DP, self.low[:, None], self.high[:, None])
        z, beyond = (inside - self.centre[:, None])[..., None], (x_DP - inside)[..., None]
        b, q = self.linear[:, None], self.quadratic[:, None]
        return b * z + q * z**2 + beyond * (b + 2 * q * z)


def fit(runs: Sequence[Ends]) -> Curve:
    """Return the least-squares curve through a reference's ends.

    Each run has an intercept. The quadratic term needs a run with three ends; without such a run, the curve is a line.
    """
    x = np.concatenate([run.x for run in runs], axis=1)
    centre = x.mean(1)
    squares = max(run.x.shape[1] for run in runs) > 2
    normal, right = np.zeros((len(x), 2, 2)), np.zeros((len(x), 2, runs[0].y.shape[-1]))
    for run in runs:
        z = run.x - centre[:, None]
        terms = np.stack([z, z**2 * squares], -1)
        terms = terms - terms.mean(1, keepdims=True)  # equivalent to an intercept per run
        normal += np.einsum("dei,dej->dij", terms, terms)
        right += np.einsum("dei,deq->diq", terms, run.y - run.y.mean(1, keepdims=True))
    solved = np.linalg.pinv(normal) @ right
    return Curve(solved[:, 0], solved[:, 1], centre, x.min(1), x.max(1))


def height(run: Ends, curve: Curve, at_DP: np.ndarray) -> np.ndarray:
    """Return a run's height u at [D, P], [D, P, Q]."""
    order = np.argsort(run.x, axis=1, kind="stable")
    x = np.take_along_axis(run.x, order, 1)
    u = np.take_along_axis(run.y - curve.at(run.x), order[..., None], 1)
    if x.shape[1] == 1:
        return np.broadcast_to(u, (*at_DP.shape, u.shape[-1]))
    left = np.clip((x[:, None] <= at_DP[..., None]).sum(-1) - 1, 0, x.shape[1] - 2)
    x0, x1 = np.take_along_axis(x, left, 1), np.take_along_axis(x, left + 1, 1)
    u0, u1 = (np.take_along_axis(u, i[..., None], 1) for i in (left, left + 1))
    width = np.where(x1 > x0, x1 - x0, 1.0)
    share = np.clip((at_DP - x0) / width, 0.0, 1.0)[..., None]
    return u0 + share * (u1 - u0)


class ModelGap(NamedTuple):
    """Hold a model's gap to the reference.

    Args:
        by_seed: g_s, seed -> [D, Q].
        reference: Each reference seed in this gap: u - c rho - R at X, seed -> [D, Q].
        by_rate: Mean gap at each rate, [D, Q].
        labels: The runs that were read.
        loss: Mean loss at which the runs were read, [D].
        beyond: Mean distance at which runs were read past the reference's ends, [D].
        rho: Mean rho: model, reference.
        rates: Compared near-best rates: model, reference.
    """

    by_seed: dict[int, np.ndarray]
    reference: dict[int, np.ndarray]
    by_rate: dict[float, np.ndarray]
    labels: tuple[str, ...]
    loss: np.ndarray
    beyond: np.ndarray
    rho: tuple[float, float]
    rates: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def mean(self) -> np.ndarray:
        """g, [D, Q]."""
        return np.mean(list(self.by_seed.values()), axis=0)

    @property
    def octaves(self) -> float:
        """The distance from the reference's mean rate up to the model's, in octaves."""
        return 0.0 if abs(self.rho[0] - self.rho[1]) < SAME else self.rho[0] - self.rho[1]


class Gaps(NamedTuple):
    """Hold all models' gaps to a reference.

    Args:
        slopes: Slope of heights per octave of the learning rate, model -> [D, Q].
        c: Mean slope, used for the adjustment, [D, Q]; zero if fewer than `FEWEST` models have a slope.
        by_model: Model -> its gap, or the reason for a missing gap.
    """

    curve: Curve
    at: np.ndarray
    slopes: dict[str, np.ndarray]
    c: np.ndarray
    by_model: dict[str, ModelGap | str]

    @property
    def is_adjusted(self) -> bool:
        """Whether the heights are adjusted for the learning rate."""
        return len(self.slopes) >= FEWEST


NO_REACH, NO_RATE = "ends from 50%", "another rate"  # needs of an undecided verdict


def measure(
    models: Mapping[str, Sequence[Ends]],
    reference: str,
    best: float,
    *,
    reach: float = REACH,
    among: Mapping[str, Sequence[str]] | None = None,
) -> Gaps:
    """Return all models' gaps to `reference`.

    Args:
        models: Each model's runs at its near-best rates.
        reference: One of the models. At least one of its runs has two ends.
        best: The reference's best rate.
        reach: The largest distance past the reference's ends at which a run is read, in the loss unit.
        among: Labels of the runs to read, per model. Without it, runs within reach are read.
    """
    reference_runs = models[reference]
    curve = fit(reference_runs)
    at_D = np.mean([run.x[:, -1] for run in reference_runs if run.rate == best], axis=0)
    slopes = {name: slope for name, runs in models.items() if (slope := _slope(runs, curve)) is not None}
    adjusted = len(slopes) >= FEWEST
    c = np.mean(list(slopes.values()), axis=0) if adjusted else np.zeros_like(curve.linear)
    by_model: dict[str, ModelGap | str] = {}
    for name, runs in models.items():
        if name == reference:
            continue
        if among is not None:
            readable = [run for run in runs if run.label in among.get(name, ())]
        else:
            readable = [run for run in runs if _within(run, curve, at_D, reach)]
        if not readable:
            by_model[name] = NO_REACH
            continue
        model_side, reference_side = list(readable), list(reference_runs)
        if not adjusted:
            common = {run.rate for run in model_side} & {run.rate for run in reference_side}
            model_side, reference_side = (
                [run for run in side if run.rate in common] for side in (model_side, reference_side)
            )
            if not common:
                by_model[name] = NO_RATE
                continue
        by_model[name] = _gap(model_side, reference_side, curve, at_D, c, by_rate=not adjusted)
    return Gaps(curve, at_D, slopes, c, by_model)


def reading(run: Ends, at_D: np.ndarray) -> np.ndarray:
    """Return the loss at which a run is read, [D]."""
    return np.minimum(np.maximum(run.x[:, -1], at_D), run.x.max(1))


def _within(run: Ends, curve: Curve, at_D: np.ndarray, reach: float) -> bool:
    x = reading(run, at_D)[0]
    return bool(at_D[0] - reach <= x <= curve.high[0] + reach)


def _slope(runs: Sequence[Ends], curve: Curve) -> np.ndarray | None:
    """Return the slope of heights on rho, [D, Q], averaged over seeds.

    The result is None unless a seed has several rates.
    """
    slopes = []
    for seed_runs in by_seed(runs).values():
        if len(seed_runs) > 1:
            at_D = np.max([run.x[:, -1] for run in seed_runs], axis=0)
            rho = np.array([run.rho for run in seed_runs])
            heights = np.stack([height(run, curve, at_D[:, None])[:, 0] for run in seed_runs])
            centred = rho - rho.mean()
            slopes.append(np.tensordot(centred, heights, 1) / (centred**2).sum())
    return np.mean(slopes, axis=0) if slopes else None


def by_seed(runs: Sequence[Ends]) -> dict[int, list[Ends]]:
    """Return runs by seed."""
    groups: dict[int, list[Ends]] = {}
    for run in runs:
        groups.setdefault(run.seed, []).append(run)
    return groups


def _mean_rho(runs: Sequence[Ends]) -> float:
    return float(np.mean([np.mean([run.rho for run in seed_runs]) for seed_runs in by_seed(runs).values()]))


def _gap(
    model_runs: Sequence[Ends],
    reference_runs: Sequence[Ends],
    curve: Curve,
    at_D: np.ndarray,
    c: np.ndarray,
    *,
    by_rate: bool,
) -> ModelGap:
    """Return a model's gap to the reference.

    With `by_rate` there is no common slope. Sides whose seeds have different rates are then compared rate by rate.
    """
    positions = np.stack([reading(run, at_D) for run in model_runs], 1)
    heights = np.stack(
        [height(run, curve, positions[:, [i]])[:, 0] - c * run.rho for i, run in enumerate(model_runs)], 1
    )
    rho = _mean_rho(model_runs), _mean_rho(reference_runs)
    at = np.concatenate([positions, at_D[:, None]], 1)
    if by_rate and abs(rho[0] - rho[1]) > SAME:
        level = np.empty_like(heights)
        for rate in {run.rate for run in model_runs}:
            indices = [i for i, run in enumerate(model_runs) if run.rate == rate]
            level[:, indices] = reference_levels(
                [r for r in reference_runs if r.rate == rate], curve, positions[:, indices], c
            )[0]
        rho = rho[0], rho[0]
        _, seed_levels = reference_levels(reference_runs, curve, at, c)
    else:
        mean, seed_levels = reference_levels(reference_runs, curve, at, c)
        level = mean[:, :-1]
    gaps = heights - level
    seeds = list(dict.fromkeys(run.seed for run in model_runs))
    middle = np.mean([values[:, -1] for values in seed_levels.values()], axis=0)
    rates = sorted({run.rate for run in model_runs})
    return ModelGap(
        by_seed={s: gaps[:, [i for i, run in enumerate(model_runs) if run.seed == s]].mean(1) for s in seeds},
        reference={s: values[:, -1] - middle for s, values in seed_levels.items()},
        by_rate={r: gaps[:, [i for i, run in enumerate(model_runs) if run.rate == r]].mean(1) for r in rates},
        labels=tuple(run.label for run in model_runs),
        loss=positions.mean(1),
        beyond=_beyond(model_runs, positions, curve),
        rho=rho,
        rates=(tuple(rates), tuple(sorted({run.rate for run in reference_runs}))),
    )


def reference_levels(
    runs: Sequence[Ends], curve: Curve, at_DP: np.ndarray, c: np.ndarray
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return R at [D, P], [D, P, Q], and each reference seed's level."""
    levels = {
        seed: np.mean([height(run, curve, at_DP) - (c * run.rho)[:, None] for run in seed_runs], axis=0)
        for seed, seed_runs in by_seed(runs).items()
    }
    return np.mean(list(levels.values()), axis=0), levels


def _beyond(runs: Sequence[Ends], positions: np.ndarray, curve: Curve) -> np.ndarray:
    """Return how far runs are read past the reference's ends, [D].

    The mean is over a seed's rates, then over seeds.
    """
    far = np.maximum(np.maximum(positions - curve.high[:, None], curve.low[:, None] - positions), 0.0)
    seeds = dict.fromkeys(run.seed for run in runs)
    return np.mean([far[:, [i for i, run in enumerate(runs) if run.seed == s]].mean(1) for s in seeds], axis=0)
