"""Wall attention: causal softmax attention with a decay per key channel inside the scores.

    s_ij = sum_n q_in k_jn e^{P_in - P_jn} / sqrt(K),   P the running sum of log decays, per query head and channel
    o_i = sum_j softmax_j(s_ij) v_j   for j <= i

Tilde Research; public implementation: flash-linear-attention, `fla/ops/wall_attn/naive.py`. The decay multiplies each
product: a strong decay gives a score of 0, so the key keeps a weight. Queries are computed in groups of `GROUP`. Let R
be P at a group's first query. For keys up to this query, q is multiplied by e^{P_i - R} and k by e^{R - P_j}, both at
most 1. Later keys of the group use the differences P_i - P_j. The backward pass recomputes each group, so memory is
linear in T.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from seqjax.types import Array

GROUP = 32


def wall_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGV: Float[Array, "B S G V"],
    decay_BSHK: Float[Array, "B S H K"],
    start: Int[Array, ""] | int = 0,
) -> Float[Array, "B T H V"]:
    """Return Wall attention for T queries at positions from `start` on, [B, T, H, V].

    The key of position p is in slot p, and so is P in `decay_BSHK`, float32. G key-value heads serve H query heads; P
    belongs to query heads. Scores and weights are float32.
    """
    n_batch, n_new, n_heads, head_dim = q_BTHK.shape
    size = min(GROUP, n_new)
    padding = -n_new % size  # the last group reads its positions' slots
    q_BTHK, k_BSGK, v_BSGV, decay_BSHK = (
        jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q_BTHK, k_BSGK, v_BSGV, decay_BSHK)
    )
    k_BSHK, v_BSHV = (jnp.repeat(x, n_heads // x.shape[2], axis=2) for x in (k_BSGK, v_BSGV))

    def scores(x_BCHK: Array, y_BSHK: Array) -> Array:
        return jnp.einsum("bchk,bshk->bhcs", x_BCHK, y_BSHK, preferred_element_type=jnp.float32)

    @jax.checkpoint
    def attend(q_BCHK: Array, first: Array) -> Array:
        own_k_BCHK, own_v_BCHV, own_BCHK = (
            lax.dynamic_slice_in_dim(x, first, size, axis=1) for x in (k_BSHK, v_BSHV, decay_BSHK)
        )
        # Masked before the exponential, which overflows for keys after the query and for padding.
        earlier_S = jnp.arange(k_BSHK.shape[1]) <= first
        later_CC = jnp.tri(size, dtype=bool).at[:, 0].set(False)
        is_query_C = first + jnp.arange(size) < start + n_new

        def factors(mask: Array, log_BxHK: Array) -> Array:
            return jnp.exp(jnp.where(mask[..., None, None], log_BxHK, -jnp.inf))

        before_BSHK = factors(earlier_S, own_BCHK[:, :1] - decay_BSHK) * k_BSHK
        after_BCHK = factors(is_query_C, own_BCHK - own_BCHK[:, :1]) * q_BCHK
        s_BHCS = scores(after_BCHK.astype(q_BCHK.dtype), before_BSHK.astype(q_BCHK.dtype))
        between_BCCHK = factors(later_CC & is_query_C[:, None], own_BCHK[:, :, None] - own_BCHK[:, None])
        own_BCCH = jnp.sum(between_BCCHK * q_BCHK[:, :, None] * own_k_BCHK[:, None], axis=-1)
        masked = [
            jnp.where(earlier_S, s_BHCS, -jnp.inf),
            jnp.where(later_CC, jnp.moveaxis(own_BCCH, 3, 1), -jnp.inf),
        ]
        p_BHCx = jax.nn.softmax(jnp.concatenate(masked, axis=-1) * head_dim**-0.5, axis=-1).astype(v_BSHV.dtype)
        v_BxHV = jnp.concatenate([v_BSHV, own_v_BCHV], axis=1)
        return jnp.einsum("bhcx,bxhv->bchv", p_BHCx, v_BxHV)

    groups = jnp.moveaxis(q_BTHK.reshape(n_batch, -1, size, n_heads, head_dim), 1, 0)
    o_nBCHV = lax.map(lambda piece: attend(*piece), (groups, start + size * jnp.arange(len(groups))))
    return jnp.moveaxis(o_nBCHV, 0, 1).reshape(n_batch, n_new + padding, n_heads, -1)[:, :n_new]
