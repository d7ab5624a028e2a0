"""Compute partial rank correlations with intervals and permutation tests.

With ranks R and a third variable z, the correlation of x and y is the correlation of residuals,

    rho = corr(e_x, e_y),    e_x = R(x) - its regression on 1 and R(z),    e_y likewise

(partial rank correlation). Values are means over seeds. The unit is a model, so intervals bootstrap models, and seeds
within models.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from seqjax.study.gaps.statistics import LEVEL

PERMUTATIONS = 10_000


class Statistic(NamedTuple):
    """A correlation with the ends of its interval or range, nan without one."""

    value: float
    low: float = np.nan
    high: float = np.nan


def rank_correlation(x: np.ndarray, y: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Return the partial rank correlation of x and y, given `others`.

    x, y and `others` are [..., n], and the result is [...]. Ties have mean ranks. The result is nan if a residual is
    zero.
    """
    e_x, e_y = (_residuals(_ranks(values), *others) for values in (x, y))
    norms = np.sqrt((e_x**2).sum(-1) * (e_y**2).sum(-1))
    return np.where(norms > 1e-9, (e_x * e_y).sum(-1) / np.where(norms > 1e-9, norms, 1.0), np.nan)


def _ranks(values: np.ndarray) -> np.ndarray:
    return stats.rankdata(values, axis=-1)


def _residuals(ranks: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Return residuals of `ranks` after regression on 1 and ranks of `others`.

    All arrays are [..., n].
    """
    columns: list[np.ndarray] = []  # Gram-Schmidt
    for values in (*map(_ranks, others), ranks):
        left = values - values.mean(-1, keepdims=True)
        for column in columns:
            left = left - (left * column).sum(-1, keepdims=True) * column
        norm = np.sqrt((left**2).sum(-1, keepdims=True))
        columns.append(np.where(norm > 1e-9, left / np.where(norm > 1e-9, norm, 1.0), 0.0))
    return left


def break_ties(scores: np.ndarray) -> np.ndarray:
    """Return numbers [..., n] in the order of `scores` [..., n, 2].

    scores[..., 1] breaks ties in scores[..., 0].
    """
    first, second = (stats.rankdata(scores[..., i], method="dense", axis=-1) for i in range(2))
    return first * (scores.shape[-2] + 1.0) + second


class Means:
    """Means over all seeds, or over bootstrapped seeds, of each model.

    A model's values are [seeds, numbers].
    """

    def __init__(self, values: Sequence[np.ndarray]):
        self.counts = np.array([len(of_model) for of_model in values])
        padding = [((0, self.counts.max() - n), (0, 0)) for n in self.counts]
        self.values = np.array([np.pad(v, p) for v, p in zip(values, padding, strict=True)])

    def all(self) -> np.ndarray:
        """Return the means [models, numbers]."""
        return self.values.sum(1) / self.counts[:, None]

    def drawn(self, models: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return means [draws, models, numbers] over bootstrapped seeds.

        `models` are model indices [draws, models].
        """
        counts, most = self.counts[models][..., None], self.values.shape[1]
        seeds = (rng.random((*models.shape, most)) * counts).astype(int)
        counted = (np.arange(most) < counts)[..., None]
        return (self.values[models[..., None], seeds] * counted).sum(-2) / counts


def interval(value: float, draws: np.ndarray) -> Statistic:
    """Return a correlation with its 95% interval from quantiles of `draws`.

    There is no interval if most draws are nan.
    """
    if np.isnan(draws).sum() > len(draws) / 2:
        return Statistic(value)
    tail = (1 - LEVEL) / 2
    return Statistic(value, *(float(end) for end in np.nanquantile(draws, (tail, 1 - tail))))


def least(n: int, *, others: int = 1, level: float = 1 - LEVEL) -> float:
    """Return the smallest significant |rho| over n models.

    The test is two-sided at `level`. `others` is the number of variables controlled for.
    """
    freedom = n - 2 - others
    t = special.stdtrit(freedom, 1 - level / 2)
    return float(t / np.sqrt(t**2 + freedom))


def p_values(
    tests: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]], *, n: int, seed: int = 0
) -> list[float]:
    """Return each test's p-value for |rho|, corrected for the maximum over all tests.

    A test is (indices of its models among n, x, y, z). The null distribution permutes the residuals of y and controls
    for z again (Freedman and Lane, J. Bus. Econ. Stat. 1, 1983). All tests share the same permutations of models, so
    correlated tests cost little correction.
    """
    if not tests:
        return []
    keys = np.random.default_rng(seed).random((PERMUTATIONS, n))
    largest = np.zeros(len(keys))
    for models, x, y, z in tests:
        e_x, e_y = (_residuals(_ranks(values), z) for values in (x, y))
        permuted = e_y[np.argsort(keys[:, models], axis=1)]
        z = _residuals(_ranks(z))
        permuted = permuted - (permuted @ z / max(z @ z, 1e-9))[:, None] * z
        norms = np.sqrt((permuted**2).sum(1) * (e_x @ e_x))
        largest = np.maximum(largest, np.abs(permuted @ e_x) / np.maximum(norms, 1e-9))
    observed = [np.nan_to_num(abs(rank_correlation(x, y, z))) for _, x, y, z in tests]
    return [float((1 + np.sum(largest >= value - 1e-9)) / (1 + len(largest))) for value in observed]


def p_text(p: float) -> str:
    """Format a p-value, such as 'p = 0.015' or 'p < 0.001'."""
    return "p < 0.001" if p < 0.0005 else f"p = {p:.3f}"


def reliability(values: Sequence[np.ndarray]) -> float:
    """Return the between-model fraction of the variance of seed means.

    It is nan if no model has two seeds.
    """
    several = [of_model for of_model in values if len(of_model) > 1]
    between = np.var([of_model.mean() for of_model in values], ddof=1) if len(values) > 1 else 0.0
    if not several or not between:
        return np.nan
    freedom = sum(len(of_model) - 1 for of_model in several)
    within = sum(((of_model - of_model.mean()) ** 2).sum() for of_model in several) / freedom
    return float(max(0.0, 1 - within * np.mean([1 / len(of_model) for of_model in values]) / between))
