"""How gaps change with training tokens: the slope of a model's gap per doubling.

Per run, the gap at its ends (without the rate's slope) is regressed on log2 of the tokens, over the ends within reach
of the reference. Runs are weighted by their spread of log2 tokens. The error is pooled over all models, so it needs a
model with two runs.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from seqjax.study.gaps import heights
from seqjax.study.gaps.heights import Curve, Ends
from seqjax.study.gaps.statistics import Estimate


def per_doubling(
    models: Mapping[str, Sequence[Ends]], theirs: Sequence[Ends], curve: Curve, *, reach: float
) -> dict[str, Estimate]:
    """Return the change of each model's gap per doubling of the tokens; `models` are without the reference."""
    zero = np.zeros_like(curve.linear)
    slopes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, runs in models.items():
        found = []
        for run in runs:
            inside = (run.x[0] >= curve.low[0] - reach) & (run.x[0] <= curve.high[0] + reach)
            z = np.log2(run.tokens[inside])
            if len(np.unique(z)) < 2:
                continue
            at = run.x[:1, inside]
            level, _ = heights.reference_levels(theirs, curve, at, zero)
            gap = (run.y[:1, inside] - curve.at(at) - level)[0, :, 0]
            z = z - z.mean()
            found.append((float(z @ gap / (z @ z)), float(z @ z)))
        if found:
            slopes[name] = tuple(np.array(column) for column in zip(*found, strict=True))  # type: ignore[assignment]
    means = {name: float(np.average(b, weights=w)) for name, (b, w) in slopes.items()}
    freedom = sum(len(b) - 1 for b, _ in slopes.values())
    if not freedom:
        return {name: Estimate(mean) for name, mean in means.items()}
    squares = sum(float(w @ (b - means[name]) ** 2) for name, (b, w) in slopes.items())
    return {
        name: Estimate(means[name], float(np.sqrt(squares / freedom / w.sum())), freedom)
        for name, (_, w) in slopes.items()
    }
