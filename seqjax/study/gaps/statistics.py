"""Estimates, variances drawn towards a common one, Satterthwaite's degrees of freedom, and Holm's procedure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, special

LEVEL = 0.95
NO_FREEDOM = 1e-6  # degrees of freedom that are zero up to rounding
# How sure the spread of the models' variances of seeds is not underestimated. Few seeds seldom show that variances
# differ, and drawing one too far towards the others misleads.
SURE = 0.85


class Part(NamedTuple):
    """A part of the variance of an estimate, and its degrees of freedom."""

    variance: float
    freedom: float


class Estimate(NamedTuple):
    """A value with its standard error and degrees of freedom; without an `error` it has no interval."""

    value: float
    error: float | None = None
    freedom: float = np.inf

    @property
    def half(self) -> float | None:
        """Half the width of the 95% interval (Student's t)."""
        return None if self.error is None else quantile(self.freedom, (1 + LEVEL) / 2) * self.error

    @property
    def interval(self) -> tuple[float, float] | None:
        """The ends of the 95% interval."""
        return None if self.half is None else (self.value - self.half, self.value + self.half)

    @property
    def differs(self) -> bool:
        """Whether the 95% interval excludes zero."""
        return self.half is not None and abs(self.value) > self.half

    def text(self, digits: int = 3) -> str:
        """Return the signed value with half the width of its interval, "+0.125 ± 0.047"."""
        return f"{self.value:+.{digits}f}" + ("" if self.half is None else f" ± {self.half:.{digits}f}")


def quantile(freedom: float, p: float) -> float:
    """Return the quantile of Student's t; `freedom` may be infinite."""
    return float(special.ndtri(p) if np.isinf(freedom) else special.stdtrit(freedom, p))


def p_value(distance: float, error: float, freedom: float) -> float:
    """Return the one-sided p-value of a value that lies `distance` beyond the hypothesis."""
    if error == 0:
        return float(distance <= 0)
    t = -distance / error
    return float(special.ndtr(t) if np.isinf(freedom) else special.stdtr(freedom, t))


def power(distance: float, error: float, freedom: float, *, level: float) -> float:
    """Return the power of a one-sided t-test at `level` for a value that lies `distance` beyond the hypothesis."""
    if error == 0:
        return float(distance > 0)
    if np.isinf(freedom):
        return float(special.ndtr(distance / error - quantile(freedom, 1 - level)))
    return float(1 - special.nctdtr(freedom, distance / error, quantile(freedom, 1 - level)))


def combined(parts: Sequence[Part]) -> Part:
    """Return the sum of independent variances, with Satterthwaite's degrees of freedom."""
    total = float(sum(part.variance for part in parts))
    of_sum = sum(part.variance**2 / part.freedom for part in parts)
    return Part(total, total**2 / of_sum if of_sum > 0 else np.inf)


class Spread(NamedTuple):
    """The variance of seeds: the pooled one, the degrees of freedom that all sides lend, and their sum."""

    pooled: float
    prior: float
    most: float

    def of(self, values: Sequence[float]) -> Part:
        """Return the variance of a side's seeds: drawn towards the pooled one, but never below its own.

        With Q the sum of squares around the mean and f its degrees of freedom, s^2 = (f_0 s_0^2 + Q) / (f_0 + f) with
        f_0 + f degrees of freedom (Smyth 2004, doi 10.2202/1544-6115.1027); for a single value s_0^2.
        """
        freedom = len(values) - 1
        squares = float(np.sum((np.asarray(values) - np.mean(values)) ** 2))
        own = squares / freedom if freedom else 0.0
        share = freedom / (self.prior + freedom) if freedom else 0.0
        drawn = (1 - share) * self.pooled + share * own
        return Part(max(drawn, own), max(min(self.prior + freedom, self.most), 1.0))


def spread(sides: Sequence[Sequence[float]]) -> Spread | None:
    """Return the common variance of the seeds of several sides, each with the values of its seeds.

    None if no side has a second seed.
    """
    several = [np.asarray(values) for values in sides if len(values) > 1]
    if not several:
        return None
    sums = np.array([np.sum((values - values.mean()) ** 2) for values in several])
    freedoms = np.array([len(values) - 1.0 for values in several])
    return Spread(float(sums.sum() / freedoms.sum()), _prior_freedom(sums, freedoms), float(freedoms.sum()))


def _prior_freedom(sums: np.ndarray, freedoms: np.ndarray) -> float:
    """Return the degrees of freedom f_0 that all sides lend to each one's variance; infinite if variances agree.

    If the true variances are 1 / chi^2 with f_0 degrees of freedom, up to a factor, log(Q_m / f_m) has the variance
    trigamma(f_m / 2) + trigamma(f_0 / 2), and the mean digamma(f_m / 2) - log(f_m / 2) and a constant. Its variance
    over models is taken at the upper limit of `SURE`.
    """
    half, total = freedoms / 2, float(sums.sum())
    if len(half) < 2 or total <= 0:
        return np.inf
    # The floor keeps the logarithm of a model without spread finite.
    logs = np.log(np.maximum(sums / total / half, 1e-6)) - special.digamma(half) + np.log(half)
    limit = float(((logs - logs.mean()) ** 2).sum() / special.chdtri(len(logs) - 1, SURE))
    beyond = limit - float(special.polygamma(1, half).mean())
    if beyond <= special.polygamma(1, 1e6):
        return np.inf
    half_prior: Any = optimize.brentq(lambda x: float(special.polygamma(1, x)) - beyond, 1e-6, 1e6)
    return 2 * float(half_prior)


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
