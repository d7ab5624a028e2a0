"""MesaNet's recurrence against exact solutions, and its gradient against autodiff through the steps."""

import jax
import jax.numpy as jnp
import numpy as np

from seqjax.ops import mesa as mesa_lib
from seqjax.ops.mesa import mesa

B, T, H, K, V = 2, 21, 2, 6, 5


def operands():
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(B, T, H, K)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, g, beta = rng.normal(size=(B, T, H, V)), -np.exp(rng.normal(size=(B, T, H)) - 1), rng.uniform(size=(B, T, H))
    ridge, state = rng.uniform(0.25, 2, size=(H, K)), rng.normal(size=(B, H, K, K + V))
    state[..., :K] = state[..., :K] @ state[..., :K].swapaxes(-1, -2)
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta, ridge, state))


def exact(q, k, v, g, beta, ridge, state):
    """Solve each token's system, in NumPy's float64 or JAX."""

    def token(state, x):
        q, k, v, g, beta = x
        written = beta[..., None, None] * k[..., None] * jnp.concatenate([k, v], -1)[..., None, :]
        state = jnp.exp(g)[..., None, None] * state + written
        solution = jnp.linalg.solve(state[..., :K] + jax.vmap(jnp.diag)(ridge), q[..., None])
        return state, jnp.einsum("bhk,bhkv->bhv", solution[..., 0], state[..., K:])

    state, o = jax.lax.scan(token, state, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)))
    return jnp.moveaxis(o, 0, 1), state


def test_outputs_and_gradients_equal_exact_solutions():
    """From an initial state; chunks of 8 and a partial chunk.

    G is symmetric, so only the symmetric part of its gradient is defined.
    """
    arrays = operands()

    def loss(form, *arrays):
        o, state = form(*arrays)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size)).reshape(o.shape)) + jnp.sum(state), (o, state)

    def iterative(*arrays):
        return mesa(*arrays[:-1], n_steps=30, initial_state=arrays[-1], chunk_size=8)

    got, want = (
        jax.jit(jax.value_and_grad(lambda *x, f=form: loss(f, *x), argnums=range(7), has_aux=True))(*arrays)
        for form in (iterative, exact)
    )
    got, want = (
        (result, (*grads, jnp.concatenate([g_state + g_state.swapaxes(-1, -2), s_state], -1)))
        for result, (*grads, d_state) in (got, want)
        for g_state, s_state in [jnp.split(d_state, [K], axis=-1)]
    )
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-5 * np.abs(w).max())


def test_a_zero_query_has_a_zero_read():
    """The first step's denominator is zero."""
    q, *others, _ = operands()
    o, _ = jax.jit(lambda *x: mesa(*x, n_steps=3))(0 * q, *others)
    gradient = jax.jit(jax.grad(lambda q: mesa(q, *others, n_steps=3)[0].sum()))(0 * q)
    np.testing.assert_array_equal(o, 0)
    assert np.isfinite(gradient).all()
    assert mesa_lib.CHUNK > T
