"""Test partial rank correlations on data with known correlations."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from lab.foretell import rank_correlation
from lab.foretell.rank_correlation import Means, break_ties, interval, least, p_values, reliability


def rho(*values):
    return float(rank_correlation.rank_correlation(*map(np.asarray, values)))


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    result: Any = stats.spearmanr(x, y)
    return float(result.statistic)


def drawn(rng: np.random.Generator, n: int, *, of_u: float, seeds: int = 3, noise: float = 0.3):
    """Return x, y and z [n, seeds]: y = z + u, and x = 0.7 z + `of_u` u + noise; seeds add noise."""
    z, u = rng.normal(size=(2, n))
    x = 0.7 * z + of_u * u + np.sqrt(1 - of_u**2) * rng.normal(size=n)
    return [
        values[:, None] + part * noise * rng.normal(size=(n, seeds)) for values, part in ((x, 1), (z + u, 1), (z, 0.2))
    ]


def test_equals_the_correlation_of_rank_residuals() -> None:
    x, y, z, w = np.random.default_rng(0).integers(8, size=(4, 15))  # with ties
    assert rho(x, y) == pytest.approx(spearman(x, y))
    one, other, both = (spearman(a, b) for a, b in ((x, z), (y, z), (x, y)))
    expected = (both - one * other) / np.sqrt((1 - one**2) * (1 - other**2))
    assert rho(x, y, z) == pytest.approx(expected)
    design = np.stack([np.ones(15), *map(stats.rankdata, (z, w))], 1)
    e_x, e_y = (r - design @ np.linalg.lstsq(design, r)[0] for r in map(stats.rankdata, (x, y)))
    assert rho(x, y, z, w) == pytest.approx(np.corrcoef(e_x, e_y)[0, 1])
    assert rho(x, y, z, z) == pytest.approx(expected), "a duplicate control changes nothing"
    assert np.isnan(rho(np.ones(15), y, z)) and np.isnan(rho(z, y, z)), "x has no residual"
    several = rank_correlation.rank_correlation(np.stack([x, z]), np.stack([y, y]), np.stack([w, w]))
    np.testing.assert_allclose(several, [rho(x, y, w), rho(z, y, w)])


def test_shared_variable_is_controlled_for() -> None:
    x, y, z = (values.mean(1) for values in drawn(np.random.default_rng(0), 4000, of_u=0.0))
    assert rho(x, y) > 0.3 and abs(rho(x, y, z)) < 0.05


def test_second_number_breaks_ties() -> None:
    scores = np.array([[1.0, -3.0], [0.5, 9.0], [1.0, -2.0], [0.5, 9.0]])
    assert stats.rankdata(break_ties(scores)).tolist() == [3, 1.5, 4, 1.5]


def test_seeds_are_drawn_within_a_model() -> None:
    means = Means([np.array([[1.0], [3.0]]), np.array([[5.0]]), np.array([[7.0], [8.0], [12.0]])])
    assert means.all().tolist() == [[2], [5], [9]]
    values = means.drawn(np.tile([2, 0, 1, 0], (4000, 1)), np.random.default_rng(0))[..., 0]
    assert set(values[:, 2]) == {5} and set(values[:, 1]) == {1, 2, 3} and values[:, 0].min() == 7
    np.testing.assert_allclose(values.mean(0), [9, 2, 5, 2], atol=0.1)
    assert abs(np.corrcoef(values[:, 1], values[:, 3])[0, 1]) < 0.1, "repeated models get independent seeds"


@pytest.mark.parametrize("of_u", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_interval_covers_the_true_value(of_u) -> None:
    """Of 200 studies 95% should be covered; 89% is three standard errors lower, and 100% would be too wide."""
    rng = np.random.default_rng(1)
    true = rho(*(values.mean(1) for values in drawn(rng, 100_000, of_u=of_u)))
    covered, widths = 0, []
    for _ in range(200):
        x, y, z = drawn(rng, 20, of_u=of_u)
        of_x, of_y = Means([v[:, None] for v in x]), Means([np.stack(v, 1) for v in zip(y, z, strict=True)])
        models = rng.integers(20, size=(300, 20))
        losses = of_y.drawn(models, rng)
        draws = rank_correlation.rank_correlation(of_x.drawn(models, rng)[..., 0], losses[..., 0], losses[..., 1])
        estimate = interval(rho(x.mean(1), y.mean(1), z.mean(1)), draws)
        covered += estimate.low <= true <= estimate.high
        widths.append(estimate.high - estimate.low)
    assert 178 <= covered < 200
    assert np.mean(widths) < 1.1, "about half of the possible range"
    assert np.isnan(interval(0.5, np.full(10, np.nan)).low)


@pytest.mark.slow
def test_p_values_are_calibrated_and_detect_a_correlation(monkeypatch) -> None:
    """Without a correlation, the smallest of five p-values is below 5% in one study of twenty."""
    monkeypatch.setattr(rank_correlation, "PERMUTATIONS", 400)
    rng, small, detected = np.random.default_rng(2), 0, 0
    for seed in range(200):
        studies = [[values.mean(1) for values in drawn(rng, 20, of_u=0.0)] for _ in range(5)]
        y, z = studies[0][1:]
        tests = [(np.arange(20), 0.7 * z + 0.7 * x, y, z) for x, *_ in studies]
        small += min(p_values(tests, n=20, seed=seed)) < 0.05
        # Give the first test a real correlation.
        tests[0] = (np.arange(20), y + 0.5 * studies[1][0], y, z)
        detected += p_values(tests, n=20, seed=seed)[0] < 0.05
    assert 1 <= small <= 20, "10 are expected, with a standard deviation of 3"
    assert detected > 190


def test_identical_tests_need_no_correction() -> None:
    x, y, z = (values.mean(1) for values in drawn(np.random.default_rng(3), 20, of_u=0.5))
    test = (np.arange(20), x, y, z)
    (single,) = p_values([test], n=20)
    assert 0.001 < single < 0.2
    assert p_values([test] * 5, n=20) == [single] * 5
    other = (np.arange(20), *(values.mean(1) for values in drawn(np.random.default_rng(4), 20, of_u=0.0)))
    assert single < p_values([test, other], n=20)[0] < 2 * single + 0.01
    some = np.array([0, *range(2, 20)])
    assert p_values([(some, x[some], y[some], z[some])], n=20)[0] < 0.3
    assert p_values([(np.arange(20), np.ones(20), y, z)], n=20) == [1], "constant scores"
    assert p_values([], n=20) == []


def test_least_correlation_and_reliability() -> None:
    assert least(20) == pytest.approx(0.456, abs=1e-3) and least(20, level=0.01) == pytest.approx(0.575, abs=1e-3)
    rng = np.random.default_rng(5)
    models = rng.normal(size=4000)
    values = [model + 0.5 * rng.normal(size=3) for model in models]
    # The variance of a mean of three seeds is 1 (model) + 0.25 / 3 (seeds).
    assert reliability(values) == pytest.approx(1 / (1 + 0.25 / 3), abs=0.01)
    assert np.isnan(reliability([v[:1] for v in values])) and reliability([v - v.mean() for v in values]) < 1e-6
