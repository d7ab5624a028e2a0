"""Compute estimates, shrunken variances, Satterthwaite's degrees of freedom, Holm's procedure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, special

LEVEL = 0.95
NO_FREEDOM = 1e-6  # degrees of freedom that are zero up to rounding
# Confidence that the spread between seed variances is not underestimated. A few seeds rarely show that variances
# differ, and too much shrinkage misleads.
SURE = 0.85


class Part(NamedTuple):
    """Hold one variance component and its degrees of freedom."""

    variance: float
    freedom: float


class Estimate(NamedTuple):
    """Hold a value, its standard error and its degrees of freedom.

    Without an `error` there is no interval.
    """

    value: float
    error: float | None = None
    freedom: float = np.inf

    @property
    def half(self) -> float | None:
        """Half the width of the 95% interval (Student's t)."""
        return None if self.error is None else quantile(self.freedom, (1 + LEVEL) / 2) * self.error

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval: low, high."""
        return None if self.half is None else (self.value - self.half, self.value + self.half)

    @property
    def differs(self) -> bool:
        """Whether the 95% interval excludes zero."""
        return self.half is not None and abs(self.value) > self.half

    def text(self, digits: int = 3) -> str:
        """Return the signed value and half its interval's width, "+0.125 ± 0.047"."""
        return f"{self.value:+.{digits}f}" + ("" if self.half is None else f" ± {self.half:.{digits}f}")


def quantile(freedom: float, p: float) -> float:
    """Return a Student's t quantile; `freedom` may be infinite."""
    return float(special.ndtri(p) if np.isinf(freedom) else special.stdtrit(freedom, p))


def p_value(distance: float, error: float, freedom: float) -> float:
    """Return the one-sided p-value for a value `distance` beyond the hypothesis."""
    if error == 0:
        return float(distance <= 0)
    t = -distance / error
    return float(special.ndtr(t) if np.isinf(freedom) else special.stdtr(freedom, t))


def power(distance: float, error: float, freedom: float, *, level: float) -> float:
    """Return the power of a one-sided t-test at `level`.

    The true value lies `distance` beyond the hypothesis.
    """
    if error == 0:
        return float(distance > 0)
    if np.isinf(freedom):
        return float(special.ndtr(distance / error - quantile(freedom, 1 - level)))
    return float(1 - special.nctdtr(freedom, distance / error, quantile(freedom, 1 - level)))


def combined(parts: Sequence[Part]) -> Part:
    """Return the sum of independent variances, with Satterthwaite degrees of freedom."""
    total = float(sum(part.variance for part in parts))
    denominator = sum(part.variance**2 / part.freedom for part in parts)
    return Part(total, total**2 / denominator if denominator > 0 else np.inf)


class Spread(NamedTuple):
    """Hold the seed variance: pooled value, prior degrees of freedom, and their total."""

    pooled: float
    prior: float
    most: float

    def shrunk(self, values: Sequence[float]) -> Part:
        """Return a side's seed variance, shrunk towards the pooled value.

        The result is never below the sample variance. With Q the sum of squares around the mean and f its degrees of
        freedom, s^2 = (f_0 s_0^2 + Q) / (f_0 + f) with f_0 + f degrees of freedom (Smyth 2004, doi
        10.2202/1544-6115.1027). A single value has s_0^2.
        """
        freedom = len(values) - 1
        squares = float(np.sum((np.asarray(values) - np.mean(values)) ** 2))
        sample_variance = squares / freedom if freedom else 0.0
        share = freedom / (self.prior + freedom) if freedom else 0.0
        shrunk_variance = (1 - share) * self.pooled + share * sample_variance
        return Part(max(shrunk_variance, sample_variance), max(min(self.prior + freedom, self.most), 1.0))


def spread(sides: Sequence[Sequence[float]]) -> Spread | None:
    """Return the pooled seed variance; each side lists its seeds' values.

    The result is None if no side has a second seed.
    """
    several = [np.asarray(values) for values in sides if len(values) > 1]
    if not several:
        return None
    sums = np.array([np.sum((values - values.mean()) ** 2) for values in several])
    freedoms = np.array([len(values) - 1.0 for values in several])
    return Spread(float(sums.sum() / freedoms.sum()), _prior_freedom(sums, freedoms), float(freedoms.sum()))


def _prior_freedom(sums: np.ndarray, freedoms: np.ndarray) -> float:
    """Return the prior degrees of freedom f_0; infinite if the variances agree.

    Assume that the true variances follow 1 / chi^2 with f_0 degrees of freedom, up to a factor. Then log(Q_m / f_m) has
    the variance trigamma(f_m / 2) + trigamma(f_0 / 2), and its mean is digamma(f_m / 2) - log(f_m / 2) plus a constant.
    The variance over models enters at its upper confidence limit `SURE`.
    """
    half, total = freedoms / 2, float(sums.sum())
    if len(half) < 2 or total <= 0:
        return np.inf
    # The floor keeps the logarithm finite for a model without spread.
    logs = np.log(np.maximum(sums / total / half, 1e-6)) - special.digamma(half) + np.log(half)
    limit = float(((logs - logs.mean()) ** 2).sum() / special.chdtri(len(logs) - 1, SURE))
    beyond = limit - float(special.polygamma(1, half).mean())
    if beyond <= special.polygamma(1, 1e6):
        return np.inf
    half_prior: Any = optimize.brentq(lambda x: float(special.polygamma(1, x)) - beyond, 1e-6, 1e6)
    return 2 * float(half_prior)


def holm(p_values: Sequence[float], *, level: float) -> list[bool]:
    """Return which hypotheses Holm's procedure rejects.

    The probability that any true hypothesis is rejected is at most `level`. The i-th smallest p-value, out of n, is
    compared with level / (n - i + 1). The procedure stops at the first p-value above its threshold.
    """
    rejected = [False] * len(p_values)
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[i] > level / (len(p_values) - rank):
            break
        rejected[i] = True
    return rejected
