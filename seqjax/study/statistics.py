"""Confidence intervals of gaps: documents and seeds are both samples, and both variances count.

The loss of a domain is the mean over its evaluated blocks. Blocks of one document are alike, so the document is the
unit that is drawn: with the gap g_b of block b (the same block read by both runs), G_d the sum over the blocks of
document d and m_d their number,

    gap = sum_d G_d / sum_d m_d,    var = D / (D - 1) * sum_d (G_d - gap * m_d)^2 / (sum_d m_d)^2

is the estimate of a ratio with its linearised variance; with m_d = 1 it is var(G) / D. With S >= 2 seeds, var(seed
gaps) / S is added, and Student's t takes Satterthwaite's degrees of freedom. Without seeds the interval is that of the
documents alone: it says nothing about another initialisation or order of the data.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

LEVEL = 0.95


class Estimate(NamedTuple):
    """A gap, in the unit of the losses, with half the width of its 95% interval; None where none can be computed."""

    gap: float
    half_width: float | None

    @property
    def differs(self) -> bool | None:
        """Whether the interval excludes zero."""
        return None if self.half_width is None else abs(self.gap) > self.half_width


def document_variance(gaps: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the variance of the mean of block gaps [..., blocks] due to documents [blocks], and their number.

    The variance is infinite for a single document.
    """
    _, of_block = np.unique(documents, return_inverse=True)
    sizes = np.bincount(of_block)
    if len(sizes) < 2:
        return np.full(gaps.shape[:-1], np.inf), 1
    membership = np.zeros((len(of_block), len(sizes)))
    membership[np.arange(len(of_block)), of_block] = 1.0
    residuals = gaps @ membership - gaps.mean(-1, keepdims=True) * sizes
    n = len(sizes)
    return np.asarray(n / (n - 1) * (residuals**2).sum(-1) / sizes.sum() ** 2), n


def half_width(variances: Sequence[np.ndarray], degrees: Sequence[float], *, level: float = LEVEL) -> np.ndarray:
    """Return half the width of Student's interval for independent parts of a variance, each [...].

    `degrees` are the degrees of freedom of each part; those of the sum are Satterthwaite's.
    """
    parts = np.stack([np.asarray(variance) for variance in np.broadcast_arrays(*variances)])
    total = parts.sum(0)
    shape = (-1,) + (1,) * total.ndim
    of_sum = (parts**2 / np.reshape(np.asarray(degrees, float), shape)).sum(0)
    # No variance at all, or an infinite one, has no degrees of freedom; the width is zero or infinite with any.
    usable = np.isfinite(total) & (of_sum > 0)
    freedom = np.where(usable, np.square(total, where=usable, out=np.ones_like(total)), 1.0)
    freedom = freedom / np.where(usable, of_sum, 1.0)
    return np.asarray(special.stdtrit(freedom, (1 + level) / 2) * np.sqrt(total))


def mean_half_width(
    blocks: Sequence[tuple[np.ndarray, np.ndarray]], weights: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Return half the width of the interval of a weighted sum of the gaps of domains.

    `blocks` holds, per domain, the gaps [..., seeds, blocks] and the document of each block [blocks]. Documents of
    different domains are independent; a seed moves all domains together, so that its part is taken of the sum.
    """
    variances, degrees = [], []
    for (gaps, documents), weight in zip(blocks, weights, strict=True):
        variance, n = document_variance(gaps.mean(-2), documents)
        if weight:  # zero times an infinite variance is no number
            variances.append(np.asarray(weight**2 * variance))
            degrees.append(max(n - 1, 1))
    n_seeds = blocks[0][0].shape[-2]
    if n_seeds > 1:
        of_seed = sum(weight * gaps.mean(-1) for (gaps, _), weight in zip(blocks, weights, strict=True))
        variances.append(np.asarray(np.var(of_seed, axis=-1, ddof=1) / n_seeds))
        degrees.append(n_seeds - 1)
    return half_width(variances, degrees)


def groups(order: Sequence[str], differ: dict[frozenset[str], bool]) -> list[list[str]]:
    """Return the longest stretches of a ranking within which no two differ; a name may stand in several.

    `differ` tells of every pair whether the interval of its difference excludes zero.
    """
    found: list[list[str]] = []
    last = -1
    for i in range(len(order)):
        end = i
        while end + 1 < len(order) and not any(differ[frozenset((order[end + 1], one))] for one in order[i : end + 1]):
            end += 1
        if end > last:
            found.append(list(order[i : end + 1]))
            last = end
    return found
