"""Wall attention in groups of queries, against all scores at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.ops.attention import causal_attention
from seqjax.ops.wall import GROUP, wall_attention

B, T, H, G, K, V = 2, 2 * GROUP + 6, 4, 2, 6, 5


def operands(low, high):
    """Draw q, k, v and sums of log decays; the log decays are between -e^high and -e^low."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape) for shape in ((B, T, H, K), (B, T, G, K), (B, T, G, V)))
    decay = -np.cumsum(np.exp(rng.uniform(low, high, size=(B, T, H, K))), axis=1)
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, decay))


def all_scores(q, k, v, decay):
    k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
    # Masked before the exponential: the difference of a later key is positive, and its exponential may overflow.
    later = jnp.tri(T, dtype=bool)[..., None, None]
    between = jnp.exp(jnp.where(later, decay[:, :, None] - decay[:, None], -jnp.inf))
    scores = jnp.sum(q[:, :, None] * k[:, None] * between, -1) * K**-0.5
    return jnp.einsum("bijh,bjhv->bihv", jax.nn.softmax(jnp.where(later[..., 0], scores, -jnp.inf), axis=2), v)


@pytest.mark.parametrize("low, high", [(-9, -7), (-6, 4)])
def test_groups_equal_all_scores(low, high):
    """Weak decays, and decays from e^-0.002 to e^-50 in one head; outputs and gradients."""
    arrays = operands(low, high)

    def loss(form, *arrays):
        o = form(*arrays)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size)).reshape(o.shape)), o

    got, want = (
        jax.jit(jax.value_and_grad(lambda *x, f=form: loss(f, *x), argnums=(0, 1, 2, 3), has_aux=True))(*arrays)
        for form in (wall_attention, all_scores)
    )
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-5 * np.abs(w).max())


@pytest.mark.parametrize("start", [1, GROUP + 5, T - 1])
def test_later_queries_equal_the_whole_sequence(start):
    q, k, v, decay = operands(-6, 2)
    got = jax.jit(wall_attention)(q[:, start:], k, v, decay, jnp.int32(start))
    np.testing.assert_allclose(got, all_scores(q, k, v, decay)[:, start:], rtol=0, atol=1e-5)


def test_without_decay_it_is_attention():
    q, k, v, decay = operands(0, 0)
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, K - V)))
    got = jax.jit(wall_attention)(q, k, v, 0 * decay)
    np.testing.assert_allclose(got, causal_attention(q, k, v), rtol=0, atol=1e-5)
