"""Parallax attention: softmax attention minus the covariance of values and a second score.

    o_i = E[v] - Cov(r_i . k, v)   over the keys j <= i with weights p_j = softmax_j(q_i . k_j / sqrt(K))

arXiv 2605.29157, algorithm 1; public implementation: flash-linear-attention, `fla/ops/parallax/naive.py`. r . k is not
scaled. As one weighted sum, o_i = sum_j p_j (1 + E[r_i . k] - r_i . k_j) v_j, and the weights still sum to 1. Attention
is r = 0. The output is also attention's plus its derivative along -sqrt(K) r in q.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from seqjax.types import Array


def parallax_at(
    q_BTHK: Float[Array, "B T H K"],
    r_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGV: Float[Array, "B S G V"],
    positions_T: Int[Array, "T"],
    positions_S: Int[Array, "S"],
) -> Float[Array, "B T H V"]:
    """Return Parallax attention for queries and keys at any positions, [B, T, H, V].

    Keys after a query are masked. G key-value heads serve H query heads. Scores and weights are float32, and all scores
    of the T queries exist at once: call it for groups of queries (`ops.attention.in_groups`).
    """
    n_batch, n_new, n_heads, head_dim = q_BTHK.shape
    n_kv = k_BSGK.shape[2]

    def scores(x_BTHK: Array) -> Array:
        x_BTGRK = x_BTHK.reshape(n_batch, n_new, n_kv, n_heads // n_kv, head_dim)
        return jnp.einsum("btgrk,bsgk->bgrts", x_BTGRK, k_BSGK, preferred_element_type=jnp.float32)

    visible_TS = positions_T[:, None] >= positions_S
    p_BGRTS = jax.nn.softmax(jnp.where(visible_TS, scores(q_BTHK) * head_dim**-0.5, -jnp.inf), axis=-1)
    slope_BGRTS = scores(r_BTHK)
    mean_BGRT1 = jnp.sum(p_BGRTS * slope_BGRTS, axis=-1, keepdims=True)
    weights_BGRTS = (p_BGRTS * (1 + mean_BGRT1 - slope_BGRTS)).astype(v_BSGV.dtype)
    o_BTGRV = jnp.einsum("bgrts,bsgv->btgrv", weights_BGRTS, v_BSGV)
    return o_BTGRV.reshape(n_batch, n_new, n_heads, -1)
