"""How gaps change with training tokens: the slope of a model's gap per doubling.

Per run, the gap at its ends (without the rate's slope) is regressed on log2 of the tokens, over the ends within reach
of the reference. Runs are weighted by their spread of log2 tokens. The variance of slopes around their model's mean is
pooled over all models, so it needs a model with two runs. With w the summed weights of a side's runs, the error of a
trend is sqrt(s^2 / w + s^2 / min(w, w_R)): the reference's curve has an error, too, and its runs with many ends tell
little about the places where only some of its runs have ends.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from seqjax.study.gaps import heights
from seqjax.study.gaps.heights import Curve, Ends
from seqjax.study.gaps.statistics import Estimate


class _Slopes(NamedTuple):
    """Slopes of a model's runs [n] and their weights [n]."""

    values: np.ndarray
    weights: np.ndarray

    @property
    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))


def per_doubling(
    models: Mapping[str, Sequence[Ends]], reference: str, curve: Curve, *, reach: float
) -> dict[str, Estimate]:
    """Return the change of each model's gap to `reference` per doubling of the tokens; {} without a trend there.

    Args:
        models: Each model's runs at its near-best rates, the reference among them.
        reference: One of the models.
        curve: Its loss curve.
        reach: How far beyond the reference's ends a gap is read, in the unit of the losses.
    """
    of_model = {
        name: slopes
        for name, runs in models.items()
        if (slopes := _slopes(runs, models[reference], curve, reach)) is not None
    }
    theirs = of_model.pop(reference, None)
    if theirs is None:
        return {}
    freedom = sum(len(slopes.values) - 1 for slopes in of_model.values())
    if not freedom:
        return {name: Estimate(slopes.mean) for name, slopes in of_model.items()}
    squares = sum(float(s.weights @ (s.values - s.mean) ** 2) for s in of_model.values())
    variance = squares / freedom
    # R is a mean over seeds of means over rates, in which runs of a seed with few rates count for more.
    seeds = [len(of_seed) for of_seed in heights.by_seed(models[reference]).values()]
    effective = len(seeds) ** 2 / sum(1 / n for n in seeds) / sum(seeds)
    found = {}
    for name, slopes in of_model.items():
        own, others = float(slopes.weights.sum()), effective * float(theirs.weights.sum())
        error = np.sqrt(variance / own + variance / min(own, others))
        found[name] = Estimate(slopes.mean, float(error), freedom)
    return found


def _slopes(runs: Sequence[Ends], theirs: Sequence[Ends], curve: Curve, reach: float) -> _Slopes | None:
    """Return the slopes of the runs that have two ends within reach; None without any."""
    found = []
    for run in runs:
        inside = (run.x[0] >= curve.low[0] - reach) & (run.x[0] <= curve.high[0] + reach)
        z = np.log2(run.tokens[inside])
        if len(np.unique(z)) > 1:
            at = run.x[:1, inside]
            level, _ = heights.reference_levels(theirs, curve, at, np.zeros_like(curve.linear))
            gap = (run.y[:1, inside] - curve.at(at) - level)[0, :, 0]
            z = z - z.mean()
            found.append((float(z @ gap / (z @ z)), float(z @ z)))
    return _Slopes(*np.array(found).T) if found else None
