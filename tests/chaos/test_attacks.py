"""Some attacks of `tests.chaos.attacks`, with a fixed seed."""

import sys

import pytest

from tests import support


@pytest.mark.slow
def test_attacks_end_cleanly_or_with_one_line():
    """The attacks run in a separate process, because they fork and JAX must not have started."""
    args = [sys.executable, "-m", "tests.chaos.attacks", "--attacks=25", "--seed=1"]
    done = support.run(args, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "25 attacks" in done.stdout
