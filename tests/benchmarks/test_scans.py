"""The recurrences' benchmark in a run of a few milliseconds."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import scans
from benchmarks.harness import torch_fla
from tests import extras, support

QUICK = ("ssd", "state_scan", "short_conv_norm", "norm_mamba2")


@pytest.mark.parametrize("case", support.slow_unless(lambda case: case in QUICK, scans.CASES))
def test_recurrences_in_a_tiny_run(case) -> None:
    rows = scans.run(case, 1, 64, small=True, dim=0, repeats=1, call_s=0)
    assert "xla" in rows
    assert all(row["forward_ms"] > 0 and row["training_ms"] > 0 for row in rows.values())


def test_the_error_is_that_of_the_worst_result() -> None:
    want = jnp.array([1.0, -4.0]), jnp.array([2.0])
    assert scans.difference((jnp.array([1.0, -3.0]), jnp.array([2.2])), want) == pytest.approx(0.25)
    assert scans.difference(want, want) == 0


def test_heads_of_one_dim_for_all() -> None:
    for case, dim in (("gated_delta_rule", 96), ("kda", 64)):
        q, _, v, *_ = scans.operands(case, 1, 8, small=True, dim=dim)
        assert q.shape == v.shape == (1, 8, 768 // dim, dim)


def test_fla_gets_the_operands_that_ours_get() -> None:
    """By name, in their dtypes; those of KDA with the keys and beta apart."""
    torch = extras.package("torch")
    for case, (names, _) in torch_fla.CALLS.items():
        given = scans.operands(case, 1, 8, small=True)
        tensors = torch_fla.operands(case, [x.astype(jnp.bfloat16) if i < 3 else x for i, x in enumerate(given)], "cpu")
        assert tuple(tensors) == names
        assert [tensors[name].dtype for name in (names[0], "v", "initial_state")] == [torch.bfloat16] * 2 + [
            torch.float32
        ]
        if case != "kda":
            np.testing.assert_array_equal(tensors["initial_state"], given[4])
            continue
        exact = torch_fla.operands(case, given, "cpu")
        np.testing.assert_allclose(exact["k"].norm(dim=-1), 1, rtol=1e-5)
        np.testing.assert_allclose(exact["beta"][..., None] * exact["k"], given[1], rtol=1e-4, atol=1e-6)
