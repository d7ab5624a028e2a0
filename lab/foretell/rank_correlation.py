"""Rank correlations over a few models whose values are means over seeds, with intervals and permutation tests.

With ranks R and a third variable z, the correlation of x and y is that of residuals,

    rho = corr(e_x, e_y),    e_x = R(x) - its regression on 1 and R(z),    e_y likewise

(partial rank correlation). The unit is a model, so an interval is over draws of models; within these, seeds are drawn.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from seqjax.study.gaps.statistics import LEVEL

PERMUTATIONS = 10_000


class Found(NamedTuple):
    """A correlation with the ends of its interval or range; nan where there is none."""

    value: float
    low: float = np.nan
    high: float = np.nan


def rank_correlation(x: np.ndarray, y: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Return the correlation [...] of the ranks of x and y [..., n] less their regressions on the ranks of `others`.

    Equal values have the mean of their ranks. It is nan where nothing is left of x or y.
    """
    e_x, e_y = (_residuals(_ranks(values), *others) for values in (x, y))
    norms = np.sqrt((e_x**2).sum(-1) * (e_y**2).sum(-1))
    return np.where(norms > 1e-9, (e_x * e_y).sum(-1) / np.where(norms > 1e-9, norms, 1.0), np.nan)


def _ranks(values: np.ndarray) -> np.ndarray:
    return stats.rankdata(values, axis=-1)


def _residuals(ranks: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """Return what is left of ranks [..., n] without their mean and their regression on the ranks of `others`."""
    columns: list[np.ndarray] = []  # made orthogonal one by one
    for values in (*map(_ranks, others), ranks):
        left = values - values.mean(-1, keepdims=True)
        for column in columns:
            left = left - (left * column).sum(-1, keepdims=True) * column
        norm = np.sqrt((left**2).sum(-1, keepdims=True))
        columns.append(np.where(norm > 1e-9, left / np.where(norm > 1e-9, norm, 1.0), 0.0))
    return left


def told_apart(scores: np.ndarray) -> np.ndarray:
    """Return numbers [..., n] in the order of scores [..., n, 2], by the second one where the first are equal."""
    first, second = (stats.rankdata(scores[..., i], method="dense", axis=-1) for i in range(2))
    return first * (scores.shape[-2] + 1.0) + second


class Means:
    """Means over seeds of values [seeds, numbers] of each model, with all seeds or with seeds drawn from them."""

    def __init__(self, values: Sequence[np.ndarray]):
        self.counts = np.array([len(of_model) for of_model in values])
        padding = [((0, self.counts.max() - n), (0, 0)) for n in self.counts]
        self.values = np.array([np.pad(v, p) for v, p in zip(values, padding, strict=True)])

    def all(self) -> np.ndarray:
        """Return the means [models, numbers]."""
        return self.values.sum(1) / self.counts[:, None]

    def drawn(self, models: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the means [draws, models, numbers] over drawn seeds of the models with indices [draws, models]."""
        counts, most = self.counts[models][..., None], self.values.shape[1]
        seeds = (rng.random((*models.shape, most)) * counts).astype(int)
        counted = (np.arange(most) < counts)[..., None]
        return (self.values[models[..., None], seeds] * counted).sum(-2) / counts


def interval(value: float, draws: np.ndarray) -> Found:
    """Return a correlation with its 95% interval, the quantiles of draws of it; none where half of these are nan."""
    if np.isnan(draws).sum() > len(draws) / 2:
        return Found(value)
    tail = (1 - LEVEL) / 2
    return Found(value, *(float(end) for end in np.nanquantile(draws, (tail, 1 - tail))))


def least(n: int, *, others: int = 1, level: float = 1 - LEVEL) -> float:
    """Return the least |rho| of n models that a single two-sided test at `level` would tell from none."""
    freedom = n - 2 - others
    t = special.stdtrit(freedom, 1 - level / 2)
    return float(t / np.sqrt(t**2 + freedom))


def p_values(
    tests: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]], *, n: int, seed: int = 0
) -> list[float]:
    """Return the p-value of each test's |rho|: how often the largest of all tests is as large by chance.

    A test is (indices of its models among n, x, y, z). Chance are permutations of the residuals of y, from which z is
    taken again (Freedman and Lane, J. Bus. Econ. Stat. 1, 1983). All tests have the same ones, by the order of random
    numbers of the models, so that tests that are alike count little more than one.
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
    """Return a p-value in words, as 'p = 0.015' or 'p < 0.001'."""
    return "p < 0.001" if p < 0.0005 else f"p = {p:.3f}"


def reliability(values: Sequence[np.ndarray]) -> float:
    """Return the share of the variance of means over seeds that is between models; nan without models of two seeds."""
    several = [of_model for of_model in values if len(of_model) > 1]
    between = np.var([of_model.mean() for of_model in values], ddof=1) if len(values) > 1 else 0.0
    if not several or not between:
        return np.nan
    freedom = sum(len(of_model) - 1 for of_model in several)
    within = sum(((of_model - of_model.mean()) ** 2).sum() for of_model in several) / freedom
    return float(max(0.0, 1 - within * np.mean([1 / len(of_model) for of_model in values]) / between))
