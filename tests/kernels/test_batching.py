"""`jax.vmap` rules for batched calls.

A single call computes all elements, and each result is in the right place.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.batching import fold_vmap, loop_vmap

N, M, B, T, H = 4, 5, 3, 2, 6


def of_rows(x_BTH, y_BH):
    """Return two results whose rows depend only on the rows of the same batch entry."""
    return jnp.cumsum(x_BTH, axis=1) * y_BH[:, None], y_BH[:, ::-1] + x_BTH.sum(1)


def of_columns(x_TBH, y_HB):
    return jnp.cumsum(x_TBH, axis=0) * y_HB.T


def recorded(f):
    """Return `f` as a new function, without earlier traces, and the shapes of the first operand in its calls."""
    calls = []

    def recorder(x, y):
        calls.append(x.shape)
        return f(x, y)

    return recorder, calls


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def loop(f, x_N, y_N, in_axes=(0, 0)):
    rows = [f(*(x[i] if axis == 0 else x for x, axis in zip((x_N, y_N), in_axes, strict=True))) for i in range(N)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *rows)


def assert_equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_a_batch_is_folded_into_one_call(in_axes):
    shapes = ((B, T, H), (B, H))
    x, y = (drawn(*(N,) * (axis == 0), *shape) for axis, shape in zip(in_axes, shapes, strict=True))
    f, calls = recorded(of_rows)
    folded = fold_vmap(f, "b t g, b g -> b t g, b g", g=H)
    got = jax.vmap(folded, in_axes=in_axes)(x, y)
    assert calls[-1] == (N * B, T, H)
    assert_equal(got, loop(of_rows, x, y, in_axes))


def test_vmap_of_vmap_is_one_call():
    x, y = drawn(M, N, B, T, H), drawn(N, M, B, H)
    f, calls = recorded(of_rows)
    folded = fold_vmap(f, "b t g, b g -> b t g, b g", g=H)
    got = jax.vmap(jax.vmap(folded), in_axes=(0, 1))(x, y)
    assert calls[-1] == (M * N * B, T, H)
    want = [loop(of_rows, x[i], y[:, i]) for i in range(M)]
    assert_equal(got, jax.tree.map(lambda *xs: jnp.stack(xs), *want))


def test_the_batch_may_be_a_later_dimension():
    x, y = drawn(N, T, B, H), drawn(N, H, B)
    f, calls = recorded(of_columns)
    folded = fold_vmap(f, "t b g, g b -> t b g", g=H, axis=1)
    got = jax.vmap(folded)(x, y)
    assert calls[-1] == (T, N * B, H)
    assert_equal(got, loop(of_columns, x, y))
    assert_equal(jax.vmap(folded, in_axes=(0, None))(x, y[0]), loop(of_columns, x, y[0], (0, None)))


def test_the_batch_may_be_where_the_rule_has_b():
    def f(x_BTH, y_HB):
        z_BTH = x_BTH * y_HB.T[:, None]
        return z_BTH, jnp.swapaxes(z_BTH, 0, 1)

    x, y = drawn(N, B, T, H), drawn(N, H, B)
    folded = fold_vmap(f, "b t g, g b -> b t g, t b g", g=H, axis=None)
    for got, want in zip(jax.vmap(folded)(x, y), jax.vmap(f)(x, y), strict=True):
        assert_equal(got, want)


def test_results_without_a_batch_dimension_use_a_loop():
    """Test a function that JAX cannot vmap."""
    x, y = drawn(N, B, T, H), drawn(N, B, H)

    def sums(x_BTH, y_BH):
        result = jax.ShapeDtypeStruct((T, H), jnp.float32)
        return jax.pure_callback(lambda x, y: np.asarray(x * y[:, None]).sum(0), result, x_BTH, y_BH)

    assert_equal(jax.vmap(loop_vmap(sums, "b t g, b g -> t g"))(x, y), loop(sums, x, y))
