"""Partial rank correlations: their value, interval and p-value on data whose correlation is known."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from lab.foretell import rank_correlation
from lab.foretell.rank_correlation import Means, interval, least, p_values, reliability, told_apart


def rho(*values):
    return float(rank_correlation.rank_correlation(*map(np.asarray, values)))


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    found: Any = stats.spearmanr(x, y)
    return float(found.statistic)


def drawn(rng: np.random.Generator, n: int, *, of_u: float, seeds: int = 3, noise: float = 0.3):
    """Return x, y and z [n, seeds]: y is z and a part u of its own, x is z and the share `of_u` of u; seeds differ."""
    z, u = rng.normal(size=(2, n))
    x = 0.7 * z + of_u * u + np.sqrt(1 - of_u**2) * rng.normal(size=n)
    return [
        values[:, None] + part * noise * rng.normal(size=(n, seeds)) for values, part in ((x, 1), (z + u, 1), (z, 0.2))
    ]


def test_it_is_the_correlation_of_rank_residuals() -> None:
    x, y, z, w = np.random.default_rng(0).integers(8, size=(4, 15))  # with ties
    assert rho(x, y) == pytest.approx(spearman(x, y))
    one, other, both = (spearman(a, b) for a, b in ((x, z), (y, z), (x, y)))
    expected = (both - one * other) / np.sqrt((1 - one**2) * (1 - other**2))
    assert rho(x, y, z) == pytest.approx(expected)
    design = np.stack([np.ones(15), *map(stats.rankdata, (z, w))], 1)
    e_x, e_y = (r - design @ np.linalg.lstsq(design, r)[0] for r in map(stats.rankdata, (x, y)))
    assert rho(x, y, z, w) == pytest.approx(np.corrcoef(e_x, e_y)[0, 1])
    assert rho(x, y, z, z) == pytest.approx(expected), "what is taken out twice is taken out once"
    assert np.isnan(rho(np.ones(15), y, z)) and np.isnan(rho(z, y, z)), "nothing is left of x"
    several = rank_correlation.rank_correlation(np.stack([x, z]), np.stack([y, y]), np.stack([w, w]))
    np.testing.assert_allclose(several, [rho(x, y, w), rho(z, y, w)])


def test_what_both_share_is_taken_out() -> None:
    x, y, z = (values.mean(1) for values in drawn(np.random.default_rng(0), 4000, of_u=0.0))
    assert rho(x, y) > 0.3 and abs(rho(x, y, z)) < 0.05


def test_equal_scores_are_told_apart_by_the_second_number() -> None:
    scores = np.array([[1.0, -3.0], [0.5, 9.0], [1.0, -2.0], [0.5, 9.0]])
    assert stats.rankdata(told_apart(scores)).tolist() == [3, 1.5, 4, 1.5]


def test_seeds_are_drawn_from_those_of_a_model() -> None:
    means = Means([np.array([[1.0], [3.0]]), np.array([[5.0]]), np.array([[7.0], [8.0], [12.0]])])
    assert means.all().tolist() == [[2], [5], [9]]
    values = means.drawn(np.tile([2, 0, 1, 0], (4000, 1)), np.random.default_rng(0))[..., 0]
    assert set(values[:, 2]) == {5} and set(values[:, 1]) == {1, 2, 3} and values[:, 0].min() == 7
    np.testing.assert_allclose(values.mean(0), [9, 2, 5, 2], atol=0.1)
    assert abs(np.corrcoef(values[:, 1], values[:, 3])[0, 1]) < 0.1, "a model that is drawn twice has other seeds"


@pytest.mark.parametrize("of_u", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_the_interval_covers(of_u) -> None:
    """Of 200 studies of 20 models 95% are expected, 89% are three standard errors fewer, and 100% would be too wide."""
    rng = np.random.default_rng(1)
    true = rho(*(values.mean(1) for values in drawn(rng, 100_000, of_u=of_u)))
    covered, widths = 0, []
    for _ in range(200):
        x, y, z = drawn(rng, 20, of_u=of_u)
        of_x, of_y = Means([v[:, None] for v in x]), Means([np.stack(v, 1) for v in zip(y, z, strict=True)])
        models = rng.integers(20, size=(300, 20))
        losses = of_y.drawn(models, rng)
        draws = rank_correlation.rank_correlation(of_x.drawn(models, rng)[..., 0], losses[..., 0], losses[..., 1])
        found = interval(rho(x.mean(1), y.mean(1), z.mean(1)), draws)
        covered += found.low <= true <= found.high
        widths.append(found.high - found.low)
    assert 178 <= covered < 200
    assert np.mean(widths) < 1.1, "half of all that a correlation can be"
    assert np.isnan(interval(0.5, np.full(10, np.nan)).low)


@pytest.mark.slow
def test_permuted_models_have_no_small_p(monkeypatch) -> None:
    """With five tests of data without a correlation, the smallest p is below 5% in one of twenty studies."""
    monkeypatch.setattr(rank_correlation, "PERMUTATIONS", 400)
    rng, small, found = np.random.default_rng(2), 0, 0
    for seed in range(200):
        studies = [[values.mean(1) for values in drawn(rng, 20, of_u=0.0)] for _ in range(5)]
        y, z = studies[0][1:]
        tests = [(np.arange(20), 0.7 * z + 0.7 * x, y, z) for x, *_ in studies]
        small += min(p_values(tests, n=20, seed=seed)) < 0.05
        # The first one now has much of y's own part.
        tests[0] = (np.arange(20), y + 0.5 * studies[1][0], y, z)
        found += p_values(tests, n=20, seed=seed)[0] < 0.05
    assert 1 <= small <= 20, "10 are expected, with a standard deviation of 3"
    assert found > 190


def test_tests_that_are_alike_count_as_one() -> None:
    x, y, z = (values.mean(1) for values in drawn(np.random.default_rng(3), 20, of_u=0.5))
    test = (np.arange(20), x, y, z)
    (alone,) = p_values([test], n=20)
    assert 0.001 < alone < 0.2
    assert p_values([test] * 5, n=20) == [alone] * 5
    other = (np.arange(20), *(values.mean(1) for values in drawn(np.random.default_rng(4), 20, of_u=0.0)))
    assert alone < p_values([test, other], n=20)[0] < 2 * alone + 0.01
    some = np.array([0, *range(2, 20)])
    assert p_values([(some, x[some], y[some], z[some])], n=20)[0] < 0.3
    assert p_values([(np.arange(20), np.ones(20), y, z)], n=20) == [1], "of equal scores nothing is known"
    assert p_values([], n=20) == []


def test_the_least_correlation_and_the_reliability() -> None:
    assert least(20) == pytest.approx(0.456, abs=1e-3) and least(20, level=0.01) == pytest.approx(0.575, abs=1e-3)
    rng = np.random.default_rng(5)
    models = rng.normal(size=4000)
    values = [model + 0.5 * rng.normal(size=3) for model in models]
    # The variance of a mean of three is 1 + 0.25 / 3, of which 1 is the model's.
    assert reliability(values) == pytest.approx(1 / (1 + 0.25 / 3), abs=0.01)
    assert np.isnan(reliability([v[:1] for v in values])) and reliability([v - v.mean() for v in values]) < 1e-6
