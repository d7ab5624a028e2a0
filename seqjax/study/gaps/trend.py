"""Measure how gaps change with training tokens: the slope of a model's gap per doubling.

Per run, the gap at its ends is regressed on log2(tokens), without the learning-rate adjustment. Only ends within reach
of the reference count. Each run's weight is its sum of squares in log2(tokens). The slope variance around model means
is pooled over all models, so it needs a model with two runs. With w the summed weights on a side, a trend's error is
sqrt(s^2 / w + s^2 / min(w, w_R)). The second term is needed because the reference's curve has an error, too. Its runs
with many ends say little about losses where only some runs have ends, so w_R is capped at w.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from seqjax.study.gaps import heights
from seqjax.study.gaps.heights import Curve, Ends
from seqjax.study.gaps.statistics import Estimate


class _Slopes(NamedTuple):
    """Hold the slopes of a model's runs [n] and their weights [n]."""

    values: np.ndarray
    weights: np.ndarray

    @property
    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))


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
    reference_slopes = by_model.pop(reference, None)
    if reference_slopes is None:
        return {}
    freedom = sum(len(slopes.values) - 1 for slopes in by_model.values())
    if not freedom:
        return {name: Estimate(slopes.mean) for name, slopes in by_model.items()}
    squares = sum(float(s.weights @ (s.values - s.mean) ** 2) for s in by_model.values())
    variance = squares / freedom
    # R averages over rates, then over seeds, so a run has more weight if its seed has few rates.
    seeds = [len(seed_runs) for seed_runs in heights.by_seed(models[reference]).values()]
    effective = len(seeds) ** 2 / sum(1 / n for n in seeds) / sum(seeds)
    trends = {}
    for name, slopes in by_model.items():
        model_weight, reference_weight = float(slopes.weights.sum()), effective * float(reference_slopes.weights.sum())
        error = np.sqrt(variance / model_weight + variance / min(model_weight, reference_weight))
        trends[name] = Estimate(slopes.mean, float(error), freedom)
    return trends


def _slopes(runs: Sequence[Ends], reference_runs: Sequence[Ends], curve: Curve, reach: float) -> _Slopes | None:
    """Return the slopes of runs with two ends within reach; None without any."""
    pairs = []
    for run in runs:
        inside = (run.x[0] >= curve.low[0] - reach) & (run.x[0] <= curve.high[0] + reach)
        z = np.log2(run.tokens[inside])
        if len(np.unique(z)) > 1:
            at = run.x[:1, inside]
            level, _ = heights.reference_levels(reference_runs, curve, at, np.zeros_like(curve.linear))
            gap = (run.y[:1, inside] - curve.at(at) - level)[0, :, 0]
            z = z - z.mean()
            pairs.append((float(z @ gap / (z @ z)), float(z @ z)))
    return _Slopes(*np.array(pairs).T) if pairs else None
