"""Test bfloat16 errors against float32, per architecture."""

import math

import jax.numpy as jnp
import pytest

from lab.benchmarks import drift
from seqjax import presets


def test_relative_is_a_norm_over_all_leaves():
    want = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray([4.0])}
    got = {"a": jnp.asarray([3.0, 1.0]), "b": jnp.asarray([4.0])}
    assert drift.relative(got, want) == pytest.approx(0.2)
    assert drift.relative(want, want) == 0


def test_table_has_a_row_per_mixer():
    row = {"layers": 2, "loss": 5.0, "loss_difference": -0.001, "logits": 0.01, "gradients": 0.02}
    assert drift.table({"x": row}).splitlines()[-1] == "| `x` | 2 | 5.000 | -0.0010 | 1.00% | 2.00% |"


@pytest.mark.slow
@pytest.mark.parametrize("name", presets.names())
def test_bfloat16_error_is_below_the_rounding_bound(name):
    result = drift.measure(name)
    numbers = [result[key] for key in ("loss", "loss_difference", "logits", "gradients")]
    assert all(map(math.isfinite, numbers)), result
    assert 0 < result["logits"] < result["logits_bound"], result
    assert 0 < result["gradients"] < result["gradients_bound"], result
    # a logit and the logsumexp each change by at most the largest logit difference
    assert abs(result["loss_difference"]) <= 2 * result["largest_logit_difference"], result
