"""Causal softmax attention with queries and keys shared by a whole batch.

    o_b = P v_b,   P = softmax(q k^T * scale) over 0 <= i - j < window, computed once

Queries and keys are position tables (arXiv 2505.18522, section 3; the factorised random Synthesizer of arXiv
2005.00743). One [H, T, T] softmax and one matrix product with the concatenated values replace B softmaxes. Memory is
quadratic in T, which the table's length limits, and independent of B.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from seqjax.types import Array


def shared_attention(
    q_THK: Float[Array, "T H K"],
    k_SGK: Float[Array, "T G K"],
    v_BSGV: Float[Array, "B T G V"],
    *,
    window: int = 0,
    scale: float | None = None,
    slopes: tuple[float, ...] = (),
) -> Float[Array, "B T H V"]:
    """Return `causal_attention` with q and k repeated over the batch, [B, T, H, V].

    Scores and softmax are float32. G key-value heads serve H query heads, `window=0` means all past keys, and `slopes`,
    one per query head, add -slope * (i - j) to the scores.
    """
    seq_len, n_heads, head_dim = q_THK.shape
    n_kv = k_SGK.shape[1]
    q_TGRK = q_THK.reshape(seq_len, n_kv, n_heads // n_kv, head_dim)
    s_GRTS = jnp.einsum("tgrk,sgk->grts", q_TGRK, k_SGK, preferred_element_type=jnp.float32)
    s_GRTS = s_GRTS * (head_dim**-0.5 if scale is None else scale)
    distance_TS = jnp.arange(seq_len)[:, None] - jnp.arange(seq_len)
    if slopes:
        s_GRTS -= jnp.asarray(slopes, jnp.float32).reshape(n_kv, -1, 1, 1) * distance_TS
    visible_TS = (distance_TS >= 0) & (distance_TS < (window or seq_len))
    p_GRTS = jax.nn.softmax(jnp.where(visible_TS, s_GRTS, -jnp.inf), axis=-1).astype(v_BSGV.dtype)
    o_BTGRV = jnp.einsum("grts,bsgv->btgrv", p_GRTS, v_BSGV)
    return o_BTGRV.reshape(*v_BSGV.shape[:2], n_heads, v_BSGV.shape[-1])
