"""Parallax attention in groups of queries: its limit, attention, and its definition as a derivative."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqjax import mixers
from seqjax.ops.attention import GROUP, causal_attention
from seqjax.ops.parallax import parallax_at

B, T, H, G, K = 2, 9, 4, 2, 6


def operands(*heads):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(B, T, n, K)), jnp.float32) for n in heads]


def test_it_is_attention_plus_its_derivative():
    """The derivative of attention in q along -sqrt(K) r; both outputs and their gradients."""
    arrays, positions = operands(H, H, G, G), jnp.arange(T)

    def by_derivative(q, r, k, v):
        attend = lambda q: causal_attention(q, k, v, implementation="xla")  # noqa: E731
        return sum(jax.jvp(attend, (q,), (-(K**0.5) * r,)))

    def by_covariance(q, r, k, v):
        return parallax_at(q, r, k, v, positions, positions)

    def loss(form, *arrays):
        o = form(*arrays)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size)).reshape(o.shape)), o

    got, want = (
        jax.jit(jax.value_and_grad(lambda *x, f=form: loss(f, *x), argnums=(0, 1, 2, 3), has_aux=True))(*arrays)
        for form in (by_covariance, by_derivative)
    )
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max())


def test_a_zero_second_query_gives_transformer_pp():
    """Two groups of queries and a partial group."""
    mixer = mixers.Parallax(16, heads=2, qk_norm=True, gate=True, rngs=nnx.Rngs(0))
    plain = mixers.TransformerPP(16, heads=2, qk_norm=True, gate=True, rngs=nnx.Rngs(1))
    mixer.q.r.w[...] = jnp.zeros((16, 16))
    nnx.update(plain, nnx.state(mixer, lambda path, _: path[0] in ("k", "v", "out", "gate", "q_norm", "k_norm")))
    plain.q.w[...] = mixer.q.q.w[...]
    x_BTD = jax.random.normal(jax.random.key(1), (1, 2 * GROUP + 5, 16))
    want = jax.jit(plain)(x_BTD)
    np.testing.assert_allclose(jax.jit(mixer)(x_BTD), want, rtol=0, atol=1e-5 * np.abs(want).max())
