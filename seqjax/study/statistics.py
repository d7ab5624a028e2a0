"""Confidence intervals of gaps, with the variances of documents and seeds, which are both samples.

The loss of a domain is the mean over its evaluated blocks. Blocks of a document are correlated, so the document is the
sampling unit: with the gap g_b of block b (the same block read by both runs), G_d the sum over the blocks of document d
and m_d their number,

    gap = sum_d G_d / sum_d m_d,    var = D / (D - 1) * sum_d (G_d - gap * m_d)^2 / (sum_d m_d)^2

is the estimate of a ratio with its linearised variance; with m_d = 1 it is var(G) / D. With S >= 2 seeds, var(seed
gaps) / S is added, and Student's t takes Satterthwaite's degrees of freedom. Without several seeds the interval covers
only documents, not another initialisation or order of the data.

Three seeds alone leave two degrees of freedom. Where many models have the same seeds, `seed_parts` draws the variance
of each model's seeds towards that of all models, and `holm` keeps the level of all tests of a study together.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, special

LEVEL = 0.95
NO_FREEDOM = 1e-6  # degrees of freedom that are none but for rounding
# How sure the spread of the models' variances of seeds is not underestimated. Few seeds seldom show that variances
# differ, and drawing one too far towards the others misleads.
SURE = 0.85


class Estimate(NamedTuple):
    """A gap, in the unit of the losses, with half the width of its 95% interval; None if it cannot be computed."""

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
    freedom = _freedom(parts, degrees)
    return np.asarray(special.stdtrit(freedom, (1 + level) / 2) * np.sqrt(parts.sum(0)))


def _freedom(parts: np.ndarray, degrees: Sequence[float]) -> np.ndarray:
    """Return Satterthwaite's degrees of freedom of the sum of variances [parts, ...]."""
    total = parts.sum(0)
    shape = (-1,) + (1,) * total.ndim
    of_sum = (parts**2 / np.reshape(np.asarray(degrees, float), shape)).sum(0)
    # No variance at all, or an infinite one, has no degrees of freedom; the width is zero or infinite with any.
    usable = np.isfinite(total) & (of_sum > 0)
    freedom = np.where(usable, np.square(total, where=usable, out=np.ones_like(total)), 1.0)
    return np.asarray(freedom / np.where(usable, of_sum, 1.0))


def mean_half_width(
    blocks: Sequence[tuple[np.ndarray, np.ndarray]], weights: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Return half the width of the interval of a weighted sum of the gaps of domains.

    `blocks` holds, per domain, the gaps [..., seeds, blocks] and the document of each block [blocks]. Documents of
    different domains are independent; a seed moves all domains together, so its variance is that of the sum.
    """
    variances, degrees = document_parts(blocks, weights)
    n_seeds = blocks[0][0].shape[-2]
    if n_seeds > 1:
        of_seed = sum(weight * gaps.mean(-1) for (gaps, _), weight in zip(blocks, weights, strict=True))
        variances.append(np.asarray(np.var(of_seed, axis=-1, ddof=1) / n_seeds))
        degrees.append(n_seeds - 1)
    return half_width(variances, degrees)


def document_parts(
    blocks: Sequence[tuple[np.ndarray, np.ndarray]], weights: Sequence[float] | np.ndarray
) -> tuple[list[np.ndarray], list[float]]:
    """Return the variances [...] that the documents of each domain add to a weighted sum, and their degrees of freedom.

    `blocks` and `weights` are those of `mean_half_width`; the gaps are averaged over seeds.
    """
    variances, degrees = [], []
    for (gaps, documents), weight in zip(blocks, weights, strict=True):
        variance, n = document_variance(gaps.mean(-2), documents)
        if weight:  # zero times an infinite variance is no number
            variances.append(np.asarray(weight**2 * variance))
            degrees.append(float(max(n - 1, 1)))
    return variances, degrees


class Part(NamedTuple):
    """A part of the variance of an estimate, and its degrees of freedom."""

    variance: float
    freedom: float


def combined(parts: Sequence[Part]) -> Part:
    """Return the sum of independent parts, with Satterthwaite's degrees of freedom."""
    variances = np.array([part.variance for part in parts])
    return Part(float(variances.sum()), float(_freedom(variances, [part.freedom for part in parts])))


def seed_parts(gaps: Sequence[Mapping[int, float]]) -> list[Part | None]:
    """Return the variance that seeds give each model's mean gap.

    `gaps` holds, per model, the gap to one reference at every seed. With y the loss of a model at a seed, the layout is

        y_ms = model_m + seed_s + e_ms,    e_ms of variance s_m^2,

    for which the gaps, and zeros for the reference, suffice: subtracting the reference shifts every seed. Q_m is the
    sum of the squared residuals of the fit by least squares that are model m's, with f_m degrees of freedom, and s^2 =
    sum Q / sum f is the pooled variance. Each model's own is drawn towards it,

        s_m^2 = (f_0 s^2 + Q_m) / (f_0 + f_m),    with f_0 + f_m degrees of freedom, sum f at most,

    by the more, the less the Q_m / f_m differ beyond what chance does (`_prior_freedom`): Smyth's moderated variances
    (2004, doi 10.2202/1544-6115.1027). The mean gap over S seeds has the variance (s_m^2 + s_reference^2) / S, or the
    model's own var(gaps) / S if that is larger. None for a model without a second seed.
    """
    order = list(dict.fromkeys(seed for of_model in gaps for seed in of_model))
    values = np.array([[0.0] * len(order), *([of_model.get(seed, np.nan) for seed in order] for of_model in gaps)])
    present = ~np.isnan(values)
    residual, freedoms = _layout(present.tobytes(), present.shape)
    sums = np.bincount(np.nonzero(present)[0], (residual @ values[present]) ** 2, len(freedoms))
    most = freedoms.sum()
    prior = _prior_freedom(sums, freedoms)
    # An infinite prior leaves the pooled variance alone.
    share = freedoms / (prior + freedoms)
    own = sums / np.where(freedoms > NO_FREEDOM, freedoms, 1.0)
    drawn = (1 - share) * sums.sum() / max(most, NO_FREEDOM) + share * own
    parts: list[Part | None] = []
    for m, of_model in enumerate(gaps, start=1):
        n = len(of_model)
        if n < 2:
            parts.append(None)
            continue
        sides = [Part(drawn[i] / n, min(prior + freedoms[i], most)) for i in (0, m)]
        both = combined(sides)
        of_gaps = float(np.var(list(of_model.values()), ddof=1)) / n
        parts.append(Part(max(of_gaps, both.variance), min(both.freedom, float(most))))
    return parts


def _prior_freedom(sums: np.ndarray, freedoms: np.ndarray) -> float:
    """Return the degrees of freedom f_0 that all models lend to each one's variance; infinite if variances agree.

    If the true variances are 1 / chi^2 with f_0 degrees of freedom, up to a factor, log(Q_m / f_m) has the variance
    trigamma(f_m / 2) + trigamma(f_0 / 2), and the mean digamma(f_m / 2) - log(f_m / 2) and a constant. Its variance
    over models is taken at the upper limit of `SURE`.
    """
    used = freedoms > NO_FREEDOM
    half, total = freedoms[used] / 2, float(sums.sum())
    if len(half) < 2 or total <= 0:
        return np.inf
    # The floor keeps the logarithm of a model without spread finite.
    logs = np.log(np.maximum(sums[used] / total / half, 1e-6)) - special.digamma(half) + np.log(half)
    limit = float(((logs - logs.mean()) ** 2).sum() / special.chdtri(len(logs) - 1, SURE))
    beyond = limit - float(special.polygamma(1, half).mean())
    if beyond <= special.polygamma(1, 1e6):
        return np.inf
    half_prior: Any = optimize.brentq(lambda x: float(special.polygamma(1, x)) - beyond, 1e-6, 1e6)
    return 2 * float(half_prior)


@functools.lru_cache(maxsize=64)
def _layout(mask: bytes, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix [cells, cells] that leaves the residuals of a two-way layout, and the freedom of every row."""
    present = np.frombuffer(mask, bool).reshape(shape)
    rows, columns = np.nonzero(present)
    design = np.concatenate([np.eye(shape[0])[rows], np.eye(shape[1])[columns]], axis=1)
    residual = np.eye(len(rows)) - design @ np.linalg.pinv(design)
    return residual, np.bincount(rows, np.diag(residual), shape[0])


def holm(p_values: Sequence[float], *, level: float) -> list[bool]:
    """Return which hypotheses are rejected, with a probability of at most `level` that any of these is true.

    Holm's procedure: the i-th smallest of n p-values is compared with level / (n - i + 1), until the first above.
    """
    rejected = [False] * len(p_values)
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[i] > level / (len(p_values) - rank):
            break
        rejected[i] = True
    return rejected


def groups(order: Sequence[str], differ: dict[frozenset[str], bool]) -> list[list[str]]:
    """Return the longest runs of a ranking within which no two models differ; a name may be in several.

    `differ` says for every pair whether the interval of its difference excludes zero.
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
