"""Gaps at equal loss, from runs whose answer is known."""

import numpy as np
import pytest

from seqjax.study import protocol
from seqjax.study.protocol import Record, read_points, weights_at, weights_over
from seqjax.utils import UserError
from tests.study.synthetic import DOMAINS, SHARES, write_run

AGAINST = ("commoncrawl", "c4")


def record(directory, in_domain, *, model="m", seed=0, rate=1.0, schedule=1.0, **more) -> Record:
    points = read_points(write_run(directory, in_domain, **more))
    return Record(directory.name, model, seed, rate, schedule, points, {})


def test_points_are_the_evaluations(tmp_path):
    """A line of the progress in between is no point."""
    run = record(tmp_path / "a", [5.0, 4.0, 3.0], offset=0.25)
    assert run.losses_in_domain(AGAINST) == pytest.approx([5.0, 4.0, 3.0], abs=1e-6)
    assert run.losses_in_domain(()) == pytest.approx([4.8, 3.8, 2.8])
    assert run.losses(["arxiv"])[:, 0] == pytest.approx([6.25, 5.25, 4.25], abs=1e-6)
    assert set(run.points[0].means) == {"equal", "natural"}


def test_weights_interpolate_and_never_extrapolate():
    x = np.array([5.0, 4.0, 3.0, 2.0])
    y = np.array([1.0, 3.0, 2.0, 7.0])
    for at in (2.0, 2.25, 3.0, 4.9, 5.0):
        weights = weights_at(x, at)
        assert weights is not None
        assert weights @ y == pytest.approx(np.interp(at, x[::-1], y[::-1]))
    assert weights_at(x, 1.99) is None
    assert weights_at(x, 5.01) is None
    assert weights_over(x, 1.9, 3.0) is None


def test_evaluations_at_equal_loss_count_as_their_mean():
    weights = weights_at(np.array([3.0, 2.0, 3.0]), 3.0)
    assert weights == pytest.approx([0.5, 0, 0.5])
    weights = weights_at(np.array([2.0]), 2.0)
    assert weights == pytest.approx([1.0])


def test_the_mean_over_a_range_is_the_exact_integral():
    rng = np.random.default_rng(0)
    x, y = rng.permutation(np.linspace(2.0, 3.0, 7)), rng.normal(size=7)
    order = np.argsort(x)
    fine = np.linspace(2.13, 2.71, 200_001)
    expected = np.interp(fine, x[order], y[order]).mean()
    weights = weights_over(x, 2.13, 2.71)
    assert weights is not None
    assert weights.sum() == pytest.approx(1.0)
    assert weights @ y == pytest.approx(expected, abs=1e-5)


def test_the_gap_is_taken_at_equal_loss_over_the_pairs_own_overlap(tmp_path):
    """The faster run has the lower arxiv loss at the end and is still the worse one at equal loss in domain."""
    fast = record(tmp_path / "fast", [5.0, 4.0, 3.0, 2.0], offset={"arxiv": 0.25, "github": 0.5})
    slow = record(tmp_path / "slow", [5.5, 4.5, 3.5, 2.5])
    assert fast.points[-1].domains["arxiv"] < slow.points[-1].domains["arxiv"]
    gap = protocol.gap_at_lowest([(fast, slow)], AGAINST)
    assert gap is not None
    assert (gap.low, gap.high) == pytest.approx((2.5, 2.5), abs=1e-6)
    assert gap.gaps(DOMAINS) == pytest.approx(np.array([[0.25, 0.5]]), abs=1e-6)
    swapped = protocol.gap_at_lowest([(slow, fast)], AGAINST)
    assert swapped is not None
    assert swapped.gaps(DOMAINS) == pytest.approx(-gap.gaps(DOMAINS))
    # At training losses, 0.2 below: the same runs, the same gap.
    at_training_loss = protocol.gap_at_lowest([(fast, slow)], ())
    assert at_training_loss is not None
    assert at_training_loss.low == pytest.approx(2.3)


def test_the_gap_over_the_last_nats(tmp_path):
    """Lines of different slope: the gap grows from 0 at loss 0 to x, and its mean over the range is that of x."""
    steep = record(tmp_path / "steep", [5.0, 4.1, 2.9, 2.0], slope=2.0)
    flat = record(tmp_path / "flat", [5.5, 4.5, 3.5, 2.5], slope=1.0)
    gap = protocol.gap_over_range([(steep, flat)], AGAINST)
    assert gap is not None
    assert (gap.low, gap.high) == pytest.approx((2.5, 2.8), abs=1e-6)
    assert gap.gaps(["arxiv"])[0, 0] == pytest.approx(2.65, abs=1e-5)
    assert gap.slope(["arxiv"])[0] == pytest.approx(1.5, abs=1e-5)
    short = protocol.gap_over_range([(steep, flat)], AGAINST, width=9.0)
    assert short is not None
    assert short.high == pytest.approx(5.0, abs=1e-6)


def test_the_slope_is_that_of_the_run_that_is_interpolated(tmp_path):
    """At a run's own end its loss is a measurement; an error in the matched loss moves along the other's line."""
    steep = record(tmp_path / "steep", [5.0, 4.0, 2.0], slope=2.0)
    flat = record(tmp_path / "flat", [5.5, 3.5, 2.5], slope=1.0)
    for pair in ((steep, flat), (flat, steep)):
        gap = protocol.gap_at_lowest([pair], AGAINST)
        assert gap is not None
        assert gap.slope(DOMAINS) == pytest.approx([2.0, 2.0], abs=1e-5)


def test_runs_that_never_meet_have_no_gap(tmp_path):
    a = record(tmp_path / "a", [5.0, 4.0])
    b = record(tmp_path / "b", [3.0, 2.0])
    assert protocol.gap_at_lowest([(a, b)], AGAINST) is None
    assert protocol.gap_over_range([(a, b)], AGAINST) is None
    assert protocol.gap_at_lowest([], AGAINST) is None


def test_seeds_are_paired_and_compared_at_one_loss(tmp_path):
    ours = [record(tmp_path / f"a{s}", [4.0, 2.0 + s / 10], seed=s, offset=0.1 * s) for s in (0, 1, 2)]
    theirs = [record(tmp_path / f"b{s}", [4.0, 1.9], seed=s) for s in (2, 1)]
    both = protocol.pairs(ours, theirs)
    assert [(run.seed, reference.seed) for run, reference in both] == [(1, 1), (2, 2)]
    gap = protocol.gap_at_lowest(both, AGAINST)
    assert gap is not None
    assert gap.low == pytest.approx(2.2, abs=1e-6), "which all of the four have reached"
    assert gap.gaps(["arxiv"])[:, 0] == pytest.approx([0.1, 0.2], abs=1e-6)


def test_end_points_are_compared_with_the_line_through_those_of_the_schedules(tmp_path):
    """The schedules end on the line 1.5 x + 1, though every run comes down on another one, and rises at the end."""
    schedules = [
        record(tmp_path / f"r{end}", [5.0, end - 0.1, end], model="r", schedule=share, slope=1.0, offset=end / 2)
        for end, share in ((2.0, 1.0), (2.4, 0.8), (3.2, 0.6))
    ]
    run = record(tmp_path / "run", [5.0, 2.5, 2.6], offset=2.0)
    gap = protocol.gap_to_end_points([run], schedules, AGAINST, model="r")
    assert gap is not None
    assert gap.low == pytest.approx(2.6, abs=1e-6)
    assert gap.gaps(DOMAINS) == pytest.approx(np.full((1, 2), 2.6 + 1 + 2.0 - (1.5 * 2.6 + 1)), abs=1e-5)
    assert gap.slope(DOMAINS) == pytest.approx([1.5, 1.5], abs=1e-5)
    outside = record(tmp_path / "outside", [5.0, 1.9])
    assert protocol.gap_to_end_points([outside], schedules, AGAINST, model="r") is None
    assert protocol.gap_to_end_points([run], schedules[:1], AGAINST, model="r") is None, "one end point is no line"


def test_the_best_rate_has_the_lowest_loss_in_domain_at_the_end(tmp_path):
    runs = [
        record(tmp_path / f"{rate}-{seed}", [4.0, end], rate=rate, seed=seed)
        for rate, seed, end in ((1.0, 0, 2.0), (1.0, 1, 2.4), (3.0, 0, 2.1), (3.0, 1, 2.1))
    ]
    assert [(run.rate, run.seed) for run in protocol.best_rate(runs, AGAINST)] == [(3.0, 0), (3.0, 1)]
    assert protocol.best_rate([], AGAINST) == []
    rises = record(tmp_path / "rises", [4.0, 1.5, 2.3], rate=0.3)
    assert protocol.best_rate([rises, *runs], AGAINST)[0].rate == 3.0, "a lower loss on the way does not count"


def test_shares_of_the_natural_mean_follow_from_the_evaluations(tmp_path):
    runs = [record(tmp_path / str(i), [4.0, 3.0, 2.0], offset={"arxiv": 0.1 * i, "github": -0.2 * i}) for i in range(3)]
    assert protocol.natural_shares(runs, DOMAINS) == pytest.approx(SHARES, abs=1e-5)
    assert protocol.natural_shares(runs, ("arxiv",)) is None, "the mean is not one of this domain alone"
    assert protocol.natural_shares(runs[:1], DOMAINS) is None, "both domains have one loss at every evaluation"


def test_errors_name_the_fix(tmp_path):
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        read_points(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    with pytest.raises(UserError, match="no evaluation yet"):
        read_points(tmp_path)
