"""Test benchmarks.scans in small runs."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import scans
from benchmarks.harness import torch_fla
from tests import extras, support

QUICK = ("ssd", "state_scan", "short_conv_norm", "norm_mamba2")


@pytest.mark.parametrize("case", support.slow_unless(lambda case: case in QUICK, scans.CASES))
def test_small_run_measures_a_case(case) -> None:
    rows = scans.run(case, 1, 64, small=True, dim=0, repeats=1, call_s=0)
    assert "xla" in rows
    assert all(row["forward_ms"] > 0 and row["training_ms"] > 0 for row in rows.values())


def test_difference_is_the_largest_over_results() -> None:
    want = jnp.array([1.0, -4.0]), jnp.array([2.0])
    assert scans.difference((jnp.array([1.0, -3.0]), jnp.array([2.2])), want) == pytest.approx(0.25)
    assert scans.difference(want, want) == 0


def test_dim_sets_keys_and_values() -> None:
    for case, dim in (("gated_delta_rule", 96), ("kda", 64)):
        q, _, v, *_ = scans.operands(case, 1, 8, small=True, dim=dim)
        assert q.shape == v.shape == (1, 8, 768 // dim, dim)


def test_packages_are_timed_where_they_are_installed(monkeypatch) -> None:
    installed = {"fla", "flash_qla"}
    monkeypatch.setattr(torch_fla.importlib.util, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(torch_fla.torch_flash, "is_available", lambda: True)
    assert torch_fla.available("gated_delta_rule", 128) == ["fla", "flash_qla"]
    assert torch_fla.available("gated_delta_rule", 96) == ["fla"]
    assert torch_fla.available("ssd", 128) == []
    installed.remove("fla")
    assert torch_fla.available("gated_delta_rule", 128) == ["flash_qla"]


def test_fla_gets_equal_operands() -> None:
    """fla takes operands by name. For KDA it takes keys and beta separately."""
    torch = extras.package("torch")
    for case, (names, _) in torch_fla.FLA.items():
        arrays = scans.operands(case, 1, 8, small=True)
        tensors = torch_fla.operands(
            case, [x.astype(jnp.bfloat16) if i < 3 else x for i, x in enumerate(arrays)], "cpu"
        )
        assert tuple(tensors) == names
        assert [tensors[name].dtype for name in (names[0], "v", "initial_state")] == [torch.bfloat16] * 2 + [
            torch.float32
        ]
        if case != "kda":
            np.testing.assert_array_equal(tensors["initial_state"], arrays[4])
            continue
        exact = torch_fla.operands(case, arrays, "cpu")
        np.testing.assert_allclose(exact["k"].norm(dim=-1), 1, rtol=1e-5)
        np.testing.assert_allclose(exact["beta"][..., None] * exact["k"], arrays[1], rtol=1e-4, atol=1e-6)
