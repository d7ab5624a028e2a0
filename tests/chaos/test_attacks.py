"""A few of the attacks of `tests.chaos.attacks`; its command makes as many as are asked for."""

import sys

import pytest

from tests import support


@pytest.mark.slow
def test_nothing_is_silent():
    """Of a fixed seed, in a process of its own: it forks, which JAX must not have started before."""
    args = [sys.executable, "-m", "tests.chaos.attacks", "--attacks=25", "--seed=1"]
    done = support.run(args, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "25 attacks" in done.stdout
