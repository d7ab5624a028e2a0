"""Measure how gaps change with training tokens: the slope of a model's gap per doubling.

Per run, the gap at its ends is regressed on log2(tokens). Only ends within reach of the reference count. Each run's
weight is its sum of squares in log2(tokens). The effect of the learning rate itself changes with tokens, so slopes are
compared at matched rates: slope = a_m + e rho is fitted to all runs, with an intercept per model, one rate effect e,
and rho the log2 learning rate. A trend is a_m minus the reference's intercept. Its error is

    sqrt(s^2 / w + s^2 / min(w, w_R) + d^2 var(e))

s^2 is the slope variance, pooled over all models except the reference, whose runs define the level. Without a degree of
freedom (runs minus models, minus one for e) trends have no error. w and w_R are the summed weights of the model's and
the reference's runs, w_R times the share of runs that effectively count in the reference's level. d is the distance of
the mean rates in octaves. The second term is the error of the reference's level. The reference's ends may lie at other
losses than the model's, so its slope is never taken as better known than the model's: w_R is capped at w.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from seqjax.study.gaps import heights
from seqjax.study.gaps.heights import Curve, Ends
from seqjax.study.gaps.statistics import Estimate

ROUNDING = 1e-9  # of slopes and of sums of squares


class _Slopes(NamedTuple):
    """Hold the slopes of a model's runs [n], their weights [n] and log2 learning rates [n]."""

    values: np.ndarray
    weights: np.ndarray
    rho: np.ndarray

    @property
    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))

    @property
    def mean_rho(self) -> float:
        return float(np.average(self.rho, weights=self.weights))

    @property
    def information(self) -> float:
        """The weighted sum of squares of the rates; 0 with one rate."""
        squares = float(self.weights @ (self.rho - self.mean_rho) ** 2)
        return squares if squares > ROUNDING else 0.0


def per_doubling(
    models: Mapping[str, Sequence[Ends]], reference: str, curve: Curve, *, reach: float
) -> dict[str, Estimate]:
    """Return each model's change in gap to `reference` per token doubling.

    The result is {} if the reference has no slope.

    Args:
        models: Each model's runs at its near-best rates, including the reference.
        reference: One of the models.
        curve: The reference's loss curve.
        reach: How far past the reference's ends a gap is read, in the loss unit.
    """
    by_model = {
        name: slopes
        for name, runs in models.items()
        if (slopes := _slopes(runs, models[reference], curve, reach)) is not None
    }
    if reference not in by_model:
        return {}
    effect, information = _rate_effect(by_model)
    at_reference = by_model.pop(reference)
    residuals = [(x, x.values - x.mean - effect * (x.rho - x.mean_rho)) for x in by_model.values()]
    freedom = sum(len(values) - 1 for _, values in residuals) - any(x.information > 0 for x, _ in residuals)
    variance = sum(float(x.weights @ values**2) for x, values in residuals) / freedom if freedom > 0 else None
    # The reference's level averages each seed's rates, then the seeds, so a run counts more if its seed has few rates.
    # `effective` is the effective number of runs, divided by the number of runs.
    seeds = [len(seed_runs) for seed_runs in heights.by_seed(models[reference]).values()]
    effective = len(seeds) ** 2 / sum(1 / n for n in seeds) / sum(seeds)
    trends = {}
    for name, x in by_model.items():
        octaves = x.mean_rho - at_reference.mean_rho
        value = x.mean - at_reference.mean - effect * octaves
        if variance is None:
            trends[name] = Estimate(value)
            continue
        weight = float(x.weights.sum())
        share = 1 / weight + 1 / min(weight, effective * float(at_reference.weights.sum()))
        share += octaves**2 / information if information else 0.0
        trends[name] = Estimate(value, float(np.sqrt(max(variance, ROUNDING**2) * share)), freedom)
    return trends


def _rate_effect(by_model: Mapping[str, _Slopes]) -> tuple[float, float]:
    """Return the change in slope per doubling of the learning rate, and the sum of squares that determines it.

    Both are zero if no model has slopes at two rates.
    """
    information = sum(x.information for x in by_model.values())
    if not information:
        return 0.0, 0.0
    covariance = sum(float(x.weights @ ((x.rho - x.mean_rho) * (x.values - x.mean))) for x in by_model.values())
    return covariance / information, information


def _slopes(runs: Sequence[Ends], reference_runs: Sequence[Ends], curve: Curve, reach: float) -> _Slopes | None:
    """Return the slopes of runs with two ends within reach; None without any."""
    triples = []
    for run in runs:
        inside = (run.x[0] >= curve.low[0] - reach) & (run.x[0] <= curve.high[0] + reach)
        z = np.log2(run.tokens[inside])
        if len(np.unique(z)) > 1:
            # Sample 0 is the whole test text, column 0 the mean of the OOD domains. The level has no rate effect
            # (zeros), because `per_doubling` fits it.
            at = run.x[:1, inside]
            level, _ = heights.reference_levels(reference_runs, curve, at, np.zeros_like(curve.linear))
            gap = (run.y[:1, inside] - curve.at(at) - level)[0, :, 0]
            z = z - z.mean()
            triples.append((float(z @ gap / (z @ z)), float(z @ z), run.rho))
    return _Slopes(*np.array(triples).T) if triples else None
