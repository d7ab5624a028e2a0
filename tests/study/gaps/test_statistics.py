"""Shrunken variances, degrees of freedom, tests and power, against SciPy."""

import numpy as np
import pytest
from scipy import stats

from seqjax.study.gaps import statistics
from seqjax.study.gaps.statistics import Estimate, Part


def test_interval_is_student_t():
    estimate = Estimate(0.3, 0.1, 7.0)
    low, high = stats.t.interval(0.95, 7, loc=0.3, scale=0.1)
    assert estimate.interval == pytest.approx((low, high)) and estimate.half == pytest.approx((high - low) / 2)
    assert estimate.differs and not Estimate(0.2, 0.1, 7.0).differs
    assert Estimate(0.3, 0.1).half == pytest.approx(0.1959964)  # infinite degrees of freedom: the normal quantile
    assert Estimate(0.3).interval is None and not Estimate(0.3).differs
    assert estimate.text(2) == "+0.30 ± 0.24" and Estimate(-0.1).text() == "-0.100"


def test_equal_variances_add_degrees_of_freedom():
    total = statistics.combined([Part(0.5, 4.0), Part(0.5, 4.0)])
    assert total == (1.0, pytest.approx(8.0))
    assert statistics.combined([Part(1.0, 4.0), Part(0.0, 2.0)]).freedom == pytest.approx(4.0)


@pytest.mark.parametrize(("distance", "freedom"), [(0.3, 5.0), (-0.2, 12.5), (0.1, np.inf)])
def test_p_values_are_student_t(distance, freedom):
    assert statistics.p_value(distance, 0.1, freedom) == pytest.approx(stats.t.sf(distance / 0.1, freedom))


@pytest.mark.parametrize(("distance", "freedom"), [(0.3, 5.0), (0.2, 40.0), (0.25, np.inf)])
def test_power_by_simulation(distance, freedom):
    rng = np.random.default_rng(0)
    scale = np.sqrt(rng.chisquare(freedom, 200_000) / freedom) if np.isfinite(freedom) else 1.0
    t = (distance / 0.1 + rng.normal(size=200_000)) / scale
    share = (t > statistics.quantile(freedom, 0.975)).mean()
    assert statistics.power(distance, 0.1, freedom, level=0.025) == pytest.approx(share, abs=0.004)


def test_shrinkage_never_goes_below_the_sample_variance():
    rng = np.random.default_rng(1)
    sides = [list(rng.normal(scale=0.02, size=3)) for _ in range(8)]
    common = statistics.spread(sides)
    assert common is not None
    sample_variances = [float(np.var(side, ddof=1)) for side in sides]
    assert common.pooled == pytest.approx(np.mean(sample_variances)) and common.most == 16
    for side, variance in zip(sides, sample_variances, strict=True):
        shrunk = common.shrunk(side)
        assert shrunk.variance >= variance and shrunk.variance >= min(variance, common.pooled)
        assert 2 <= shrunk.freedom <= common.most
    assert common.shrunk([0.1]).variance == pytest.approx(common.pooled)


def test_prior_grows_with_agreement_of_variances():
    rng = np.random.default_rng(2)
    equal = statistics.spread([list(rng.normal(size=4)) for _ in range(40)])
    different = statistics.spread([list(rng.normal(scale=10.0 ** (i % 4), size=4)) for i in range(40)])
    assert equal is not None and different is not None and equal.prior > 10 * different.prior
    assert statistics.spread([[1.0], [2.0]]) is None


def test_holm_rejects_hand_checked_cases():
    assert statistics.holm([0.01, 0.04, 0.03, 0.005], level=0.05) == [True, False, False, True]
    assert statistics.holm([0.2, 0.01], level=0.05) == [False, True]
    assert statistics.holm([], level=0.05) == []
