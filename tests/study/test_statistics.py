"""Intervals: against formulas worked by hand, and by simulated coverage."""

import numpy as np
import pytest

from seqjax.study import statistics

# Student's t at 97.5%, from printed tables.
T = {2: 4.302653, 11: 2.200985, 29: 2.045230}


def test_documents_of_one_block_give_the_variance_of_a_mean():
    gaps = np.random.default_rng(0).normal(size=30)
    variance, n = statistics.document_variance(gaps, np.arange(30))
    assert n == 30
    assert variance == pytest.approx(np.var(gaps, ddof=1) / 30)
    width = statistics.mean_half_width([(gaps[None], np.arange(30))], [1.0])
    assert width == pytest.approx(T[29] * np.sqrt(variance))


def test_blocks_of_one_document_are_one_draw():
    """Every block three times, in a document of three: nothing new was measured."""
    gaps = np.random.default_rng(0).normal(size=12)
    single = statistics.mean_half_width([(gaps[None], np.arange(12))], [1.0])
    tripled = statistics.mean_half_width([(np.repeat(gaps, 3)[None], np.repeat(np.arange(12), 3))], [1.0])
    assert tripled == pytest.approx(single)


def test_documents_of_different_length_by_hand():
    """Blocks 1, 2, 6 of documents a, a, b: the mean is 3, residuals of the sums are 3 - 6 and 6 - 3."""
    variance, n = statistics.document_variance(np.array([1.0, 2.0, 6.0]), np.array([4, 4, 9]))
    assert n == 2
    assert variance == pytest.approx(2 / 1 * (9 + 9) / 9)


def test_one_document_has_no_interval():
    assert np.isinf(statistics.mean_half_width([(np.array([[1.0, 2.0]]), np.array([7, 7]))], [1.0]))


def test_equal_runs_have_an_interval_of_no_width():
    assert statistics.mean_half_width([(np.zeros((3, 5)), np.arange(5))], [1.0]) == 0.0


def test_seeds_alone_give_students_t():
    """All documents alike: what is left is the variance of three seeds with two degrees of freedom."""
    of_seed = np.array([0.1, 0.4, 0.2])
    gaps = np.repeat(of_seed[:, None], 6, axis=1)
    width = statistics.mean_half_width([(gaps, np.arange(6))], [1.0])
    assert width == pytest.approx(T[2] * of_seed.std(ddof=1) / np.sqrt(3), rel=1e-6)


def test_degrees_of_freedom_are_satterthwaites():
    """Two equal variances with 2 and 11 degrees: (1 + 1)^2 / (1/2 + 1/11) = 6.769."""
    width = statistics.half_width([np.array(1.0), np.array(1.0)], [2, 11])
    between = [statistics.half_width([np.array(2.0)], [df]) for df in (6, 7)]
    assert between[1] < width < between[0]
    # Tables of t are interpolated in the reciprocal of the degrees of freedom, in which t is nearly a line.
    assert width == pytest.approx(np.interp(-1 / 6.769, [-1 / 6, -1 / 7], between), rel=1e-3)


def test_a_mean_of_domains_shares_seeds_but_not_documents():
    """With two domains that only a seed moves, and both alike, the mean is no surer than either."""
    of_seed = np.array([0.1, 0.4, 0.2])
    gaps = np.repeat(of_seed[:, None], 6, axis=1)
    one = statistics.mean_half_width([(gaps, np.arange(6))], [1.0])
    both = statistics.mean_half_width([(gaps, np.arange(6))] * 2, [0.5, 0.5])
    assert both == pytest.approx(one)
    # Documents of two domains are different texts: their variances are averaged, and the degrees of freedom add up.
    gaps = np.random.default_rng(1).normal(size=(1, 12))
    one = statistics.mean_half_width([(gaps, np.arange(12))], [1.0])
    both = statistics.mean_half_width([(gaps, np.arange(12))] * 2, [0.5, 0.5])
    assert T[29] / T[11] * one / np.sqrt(2) < both < one / np.sqrt(2)


def test_a_ranking_groups_what_cannot_be_told_apart():
    """a and b, b and c are alike, a and c differ; d differs from all."""
    differ = {frozenset(pair): True for pair in ("ac", "ad", "bd", "cd")}
    differ |= {frozenset(pair): False for pair in ("ab", "bc")}
    assert statistics.groups("abcd", differ) == [["a", "b"], ["b", "c"], ["d"]]
    assert statistics.groups("", {}) == []


def simulate(*, seeds: int, trials: int, sd_seed: float, rng: np.random.Generator) -> float:
    """Return how often the interval covers the true gap, 0.3, with 30 heavy-tailed documents of one to four blocks."""
    n_documents = 30
    of_block = np.repeat(np.arange(n_documents), rng.integers(1, 5, n_documents))
    of_document = 0.1 * rng.standard_t(4, size=(trials, 1, n_documents))
    of_seed = sd_seed * rng.normal(size=(trials, seeds, 1))
    both = 0.05 * rng.normal(size=(trials, seeds, n_documents))
    rest = 0.1 * rng.normal(size=(trials, seeds, len(of_block)))
    gaps = 0.3 + of_seed + (of_document + both)[..., of_block] + rest
    width = statistics.mean_half_width([(gaps, of_block)], [1.0])
    return float((np.abs(gaps.mean((-2, -1)) - 0.3) <= width).mean())


@pytest.mark.parametrize("sd_seed", [0.01, 0.05])
def test_a_few_simulated_intervals_cover(sd_seed):
    assert 0.9 <= simulate(seeds=3, trials=300, sd_seed=sd_seed, rng=np.random.default_rng(0)) <= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("sd_seed", [0.005, 0.02, 0.05])
def test_coverage_of_the_interval(sd_seed, capsys):
    """2,000 repeats; the standard error of a coverage of 95% is 0.5%. One seed covers what documents explain."""
    rng = np.random.default_rng(0)
    three = simulate(seeds=3, trials=2000, sd_seed=sd_seed, rng=rng)
    one = simulate(seeds=1, trials=2000, sd_seed=sd_seed, rng=rng)
    with capsys.disabled():
        print(  # noqa: T201 - what one seed covers is for people to read
            f"\nsd of seeds {sd_seed}: covered by 95% intervals {three:.3f} (3 seeds), {one:.3f} (1 seed)"
        )
    assert 0.93 <= three <= 0.97
    assert one < three + 0.01
