"""The recurrences' benchmark in a run of a few milliseconds."""

import jax.numpy as jnp
import pytest

from benchmarks import scans


@pytest.mark.parametrize("case", scans.CASES)
def test_recurrences_in_a_tiny_run(case) -> None:
    rows = scans.run(case, 1, 64, small=True, repeats=1, call_s=0)
    assert "xla" in rows
    assert all(row["forward_ms"] > 0 and row["training_ms"] > 0 for row in rows.values())


def test_the_error_is_that_of_the_worst_result() -> None:
    want = jnp.array([1.0, -4.0]), jnp.array([2.0])
    assert scans.difference((jnp.array([1.0, -3.0]), jnp.array([2.2])), want) == pytest.approx(0.25)
    assert scans.difference(want, want) == 0
