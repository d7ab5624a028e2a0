"""Runs of the configs in tests/golden/losses.json, through the command, give the recorded losses.

Compared: training loss, gradient and parameter norms and learning rate of six steps, and the loss of every domain after
steps three and six. A refactoring without numerical changes gives equal bits on the recording machine (`python -m
tests.golden.make_losses --check`); the tolerance here is for other machines.
"""

import math

import pytest

from tests.golden import make_losses

GOLDEN = make_losses.read()["losses"]
NAMES = [name for name in make_losses.cases() if name in GOLDEN]  # a new config has none


def test_every_recorded_case_still_exists():
    """A removed config or case fails here."""
    assert not GOLDEN.keys() - make_losses.cases().keys()
    assert len(NAMES) == len(GOLDEN) >= 63


# test_golden_workdirs.py has a quick comparison of losses.
@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[i : i + 4] for i in range(0, len(NAMES), 4)], ids=lambda names: names[0])
def test_losses_equal_the_recorded_losses(names):
    measured = make_losses.measure(names)
    off = {name: make_losses.beyond_tolerance(measured[name], GOLDEN[name]) for name in names}
    assert not any(off.values()), off


def test_the_comparison_detects_differences():
    """It detects a wrong, non-finite or missing loss and a missing row, but accepts the last bits."""
    want = GOLDEN["top1_chunk"]
    assert not make_losses.beyond_tolerance(want, want)
    last = dict(want[-1])
    for field in last:
        if field in ("step", "tokens"):
            changes = (last[field] + 1,)
        else:
            changes = (last[field] * (1 + 3 * make_losses.TOLERANCE), math.nan)
            assert not make_losses.beyond_tolerance([*want[:-1], last | {field: last[field] * (1 + 1e-7)}], want)
        for value in changes:
            assert make_losses.beyond_tolerance([*want[:-1], last | {field: value}], want), (field, value)
        assert make_losses.beyond_tolerance([*want[:-1], {k: v for k, v in last.items() if k != field}], want)
    assert make_losses.beyond_tolerance(want[:-1], want)
