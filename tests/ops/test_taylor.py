"""Taylor linear attention against its quadratic form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.ops import taylor_linear_attention
from tests import support
from tests.ops import recurrences


def inputs(t, n_key=6, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((2, t, 2, n)), dtype) for n in (n_key, n_key, 3)]


@pytest.mark.parametrize(
    ("t", "chunk", "n_key"),
    support.slow_unless(
        lambda t, chunk, n_key: n_key == 5,
        [(1, None, 6), (37, 8, 6), (37, 8, 5), (37, 37, 1), (20, 1, 2), (150, None, 16)],
    ),
)
def test_chunked_equals_quadratic(t, chunk, n_key):
    """Odd and even key widths pair their features differently."""
    q, k, v = inputs(t, n_key)
    np.testing.assert_allclose(
        taylor_linear_attention(q, k, v, chunk_size=chunk), recurrences.taylor(q, k, v), rtol=1e-4, atol=2e-5
    )


def test_state_continues_a_sequence():
    q, k, v = inputs(37)
    first, state = taylor_linear_attention(q[:, :20], k[:, :20], v[:, :20], return_state=True, chunk_size=8)
    second = taylor_linear_attention(q[:, 20:], k[:, 20:], v[:, 20:], initial_state=state, chunk_size=8)
    want = recurrences.taylor(q, k, v)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), want, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_chunked_equals_quadratic_in_float64():
    with jax.enable_x64(True):
        args = inputs(37, dtype=np.float64)
        weights = jnp.asarray(np.random.default_rng(1).standard_normal(args[2].shape))
        f, g = (
            jax.value_and_grad(lambda a, op=op: jnp.sum(weights * op(*a)))
            for op in (lambda *a: taylor_linear_attention(*a, chunk_size=8), recurrences.taylor)
        )
        for a, b in zip(jax.tree.leaves(f(args)), jax.tree.leaves(g(args)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def test_long_sums_do_not_stall_in_bfloat16():
    """With equal keys and values of one, the denominator exceeds T / 2 and y stays 1."""
    ones = jnp.ones((1, 2000, 1, 4), jnp.bfloat16)
    y = taylor_linear_attention(ones, ones, ones, chunk_size=64)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), 1.0, atol=2**-7)
