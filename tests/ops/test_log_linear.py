"""Log-linear attention: all three forms against a sum over all pairs of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.ops.log_linear import level, log_linear, log_linear_states, log_linear_step
from seqjax.ops.ssd import ssd


def inputs(seq_len, n_levels, *, heads=3, value=4, state=5):
    rng = np.random.default_rng(0)
    x, log_a = rng.normal(size=(2, seq_len, heads, value)), -rng.uniform(0, 1, (2, seq_len, heads))
    b, c = rng.normal(size=(2, 2, seq_len, state))
    return [jnp.float32(a) for a in (x, log_a, b, c, rng.uniform(0, 2, (2, seq_len, heads, n_levels)))]


def by_pairs(x, log_a, b, c, m):
    x, log_a, b, c, m = (np.asarray(a, np.float64) for a in (x, log_a, b, c, m))
    g, y = np.cumsum(log_a, axis=1), np.zeros_like(x)
    for t in range(x.shape[1]):
        for s in range(t + 1):
            of_level = m[:, t, :, min((t ^ s).bit_length(), m.shape[-1] - 1)]
            score = (c[:, t] * b[:, s]).sum(-1)[:, None] * of_level * np.exp(g[:, t] - g[:, s])
            y[:, t] += score[..., None] * x[:, s]
    return y


@pytest.mark.parametrize(
    ("seq_len", "chunk_size", "n_levels"), [(37, 8, 7), (1, 8, 3), (16, 4, 6), (21, 5, 3), (64, 16, 7), (5, 64, 2)]
)
def test_all_forms_equal_the_sum_over_pairs(seq_len, chunk_size, n_levels):
    """Lengths include partial blocks, and more tokens than the levels can distinguish."""
    arrays = inputs(seq_len, n_levels)
    want = by_pairs(*arrays)
    parallel = jax.jit(log_linear, static_argnames="chunk_size")(*arrays, chunk_size=chunk_size)
    np.testing.assert_allclose(parallel, want, atol=2e-5)
    step, states, y = jax.jit(log_linear_step), jnp.zeros((2, n_levels - 1, 3, 5, 4)), []
    for t in range(seq_len):
        y_BHV, states = step(*(a[:, t] for a in arrays), states, jnp.int32(t))
        y.append(y_BHV)
        if t in (0, 6, seq_len - 1):
            at_once = log_linear_states(*(a[:, : t + 1] for a in arrays[:3]), n_levels=n_levels - 1)
            np.testing.assert_allclose(at_once, states, atol=2e-5)
    np.testing.assert_allclose(np.stack(y, 1), want, atol=2e-5)


def test_equal_level_weights_give_mamba2():
    *arrays, m = inputs(37, 7)
    got = jax.jit(log_linear, static_argnames="chunk_size")(*arrays, jnp.ones_like(m), chunk_size=8)
    np.testing.assert_allclose(got, jax.jit(ssd)(*arrays), atol=3e-5)


def test_chunked_gradient_equals_one_chunk():
    arrays = inputs(21, 5)

    def gradient(chunk_size):
        def loss(*arrays):
            return jnp.sum(jnp.sin(log_linear(*arrays, chunk_size=chunk_size)))

        return jax.jit(jax.grad(loss, argnums=range(5)))(*arrays)

    for x, y in zip(gradient(4), gradient(32), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * max(1, float(np.abs(y).max())))


def test_levels():
    np.testing.assert_array_equal(level(6, np.arange(7), 9), [3, 3, 3, 3, 2, 2, 0])  # 6 = 110: blocks of 4 and 2
    np.testing.assert_array_equal(level(6, np.arange(7), 3), [2, 2, 2, 2, 2, 2, 0])
    assert level(2**40 + 1, 0, 50) == 41, "exact where float32 is not"
