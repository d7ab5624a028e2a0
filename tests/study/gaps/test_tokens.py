"""Differences at equal tokens, and the speed-up to an equal OOD loss."""

import numpy as np
import pytest

from seqjax.study.gaps import compare
from tests.study.gaps.studies import TOKENS, curve, loss_at, records, run

SPEEDS = {"one card (tokens/s)": {"reference": 1000.0, "m": 500.0}}


def only_row(runs, **more):
    (row,) = compare(records(runs, **more), "reference")
    return row


def test_difference_uses_the_last_losses():
    row = only_row(
        [run("reference", seed=s) for s in range(3)] + [run("m", last=3.1, gap=0.2, seed=s) for s in range(3)]
    )
    assert row.at_equal_tokens.inside.value == pytest.approx(0.1)
    assert row.at_equal_tokens.outside.value == pytest.approx(curve(3.1) + 0.2 - curve(3.0))
    assert row.at_equal_tokens.outside.error == pytest.approx(0.0, abs=1e-9)


def test_unequal_tokens_give_no_difference_or_speed_up():
    row = only_row([run("reference"), run("m", tokens=TOKENS // 2)], speeds=SPEEDS)
    assert row.at_equal_tokens is None and row.speed_up is None and row.gap is not None


def test_equal_losses_give_the_speed_ratio():
    row = only_row([run("reference", seed=s) for s in range(2)] + [run("m", seed=s) for s in range(2)], speeds=SPEEDS)
    assert row.speed_up.value == pytest.approx(0.5) and row.speed_up.bound == ""


@pytest.mark.parametrize("worse", ["m", "reference"])
def test_speed_up_interpolates_the_better_side(worse):
    # The worse side ends at the better side's loss at 80% of the tokens.
    last = loss_at(3.0, 0.8)
    runs = [run(name, last=last if name == worse else 3.0, seed=s) for name in ("reference", "m") for s in range(2)]
    row = only_row(runs, speeds=SPEEDS)
    assert row.speed_up.value == pytest.approx(0.5 * (0.8 if worse == "m" else 1 / 0.8))


def test_loss_above_all_first_ends_gives_a_bound():
    row = only_row([run("reference"), run("m", last=3.6)], speeds=SPEEDS)
    assert row.speed_up.bound == "at most" and row.speed_up.value == pytest.approx(0.5 * 0.5)
    row = only_row([run("reference", last=3.6), run("m")], speeds=SPEEDS)
    assert row.speed_up.bound == "at least" and row.speed_up.value == pytest.approx(0.5 * 2)


def test_speed_up_interval():
    noise = [0.0, 0.02, -0.02]
    runs = [run(name, seed=s, gap=noise[s]) for name in ("reference", "m") for s in range(3)]
    row = only_row(runs, speeds=SPEEDS)
    up, error = row.speed_up, row.at_equal_tokens.outside.error
    assert up.low * up.high == pytest.approx(up.value**2)
    slope = (curve(3.0) - curve(loss_at(3.0, 0.8))) / np.log(1 / 0.8)
    # Only the seed with the lowest loss reaches the mean, between its last two ends.
    assert np.log(up.high / up.value) == pytest.approx(1.96 * error / abs(slope), rel=0.05)


def test_speeds_at_another_length_are_ignored():
    config = {"config": {"train": {"seq_len": 2048}}}
    runs = [run(name, metadata=config) for name in ("reference", "m")]
    (condition,) = SPEEDS
    assert only_row(runs, speeds=SPEEDS, conditions={condition: ("card", 2048)}).speed_up is not None
    assert only_row(runs, speeds=SPEEDS, conditions={condition: ("card", 102_400)}).speed_up is None
