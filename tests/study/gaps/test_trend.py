"""Trend: change of a gap per token doubling."""

import numpy as np
import pytest

from seqjax.study.gaps import compare
from tests.study.gaps.studies import records, run


def test_trend_is_exact_and_its_mark_needs_an_interval():
    def shrinking(share):
        return -0.08 * np.log2(share)

    # All runs end at the same losses, so no height is read past the reference's ends.
    runs = [run("reference", seed=s) for s in range(3)]
    runs += [run("shrinks", seed=s, gap=0.3, of_end=lambda t, s=s: -0.08 * np.log2(t) * (1 + 0.01 * s)) for s in (0, 1)]
    runs += [run("flat", seed=s, gap=0.1) for s in range(2)]
    runs += [run("better", seed=s, gap=-0.1, of_end=lambda t: 0.04 * np.log2(t)) for s in range(2)]
    runs += [run("one end", gap=0.1, shares=(1.0,))]
    rows = {row.model: row for row in compare(records(runs), "reference")}
    assert rows["shrinks"].per_doubling.value == pytest.approx(-0.08 * 1.005)
    assert rows["shrinks"].trend == "shrinks" and rows["flat"].trend == ""
    assert rows["better"].per_doubling.value == pytest.approx(0.04) and rows["better"].trend == "shrinks"
    assert rows["flat"].per_doubling.value == pytest.approx(0.0, abs=1e-12)
    assert rows["one end"].per_doubling is None


def test_runs_are_weighted_by_token_spread():
    runs = [run("reference", seed=s) for s in range(2)]
    runs += [run("m", seed=0, of_end=lambda t: 0.1 * np.log2(t))]
    runs += [run("m", seed=1, shares=(0.8, 1.0))]
    (row,) = compare(records(runs), "reference")
    weights = [np.var(np.log2(shares)) * len(shares) for shares in ((0.5, 0.65, 0.8, 1.0), (0.8, 1.0))]
    assert row.per_doubling.value == pytest.approx(0.1 * weights[0] / sum(weights))


def test_single_run_trend_has_no_interval():
    (row,) = compare(records([run("reference", seed=0), run("reference", seed=1), run("m", gap=0.1)]), "reference")
    assert row.per_doubling.error is None and row.trend == ""


def test_trends_are_compared_at_matched_learning_rates():
    def at_twice_the_rate(share):
        return 0.08 * np.log2(share)

    runs = [run("reference", seed=s) for s in range(3)]
    runs += [run("reference", seed=s, rate=2.0, of_end=at_twice_the_rate) for s in (0, 1)]
    runs += [run("flat", seed=s, rate=2.0, gap=0.1, of_end=at_twice_the_rate) for s in range(2)]
    runs += [run("flat at one", seed=s, gap=0.1) for s in range(2)]
    runs += [run("shrinks", seed=s, rate=2.0, gap=0.1, of_end=lambda t: 0.03 * np.log2(t)) for s in range(2)]
    rows = {row.model: row for row in compare(records(runs), "reference")}
    assert rows["flat"].per_doubling.value == pytest.approx(0.0, abs=1e-9)
    assert rows["flat at one"].per_doubling.value == pytest.approx(0.0, abs=1e-9)
    assert rows["shrinks"].per_doubling.value == pytest.approx(-0.05, abs=1e-9)


def test_a_trend_far_from_the_reference_rates_is_less_certain():
    def noisy(seed):
        return lambda share: 0.01 * (-1) ** seed * np.log2(share)

    runs = [run("reference", seed=s, rate=rate, of_end=noisy(s)) for s in range(2) for rate in (1.0, 2.0)]
    runs += [run("between", seed=s, rate=2**0.5, gap=0.1, of_end=noisy(s)) for s in range(2)]
    runs += [run("far", seed=s, rate=4.0, gap=0.1, of_end=noisy(s)) for s in range(2)]
    rows = {row.model: row for row in compare(records(runs), "reference")}
    assert 1.2 * rows["between"].per_doubling.error < rows["far"].per_doubling.error
