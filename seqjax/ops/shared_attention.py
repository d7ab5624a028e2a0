"""Causal softmax attention whose queries and keys are the same for every sequence of a batch; only the values differ.

    o_b = P v_b,   P = softmax(q k^T * scale) over 0 <= i - j < window, computed once

This is what is left of attention when queries and keys are tables over positions (arXiv 2505.18522, section 3; the
factorised random Synthesizer of arXiv 2005.00743). One [H, T, T] softmax and one matrix product with all values beside
each other take the place of B softmaxes; memory is quadratic in T, which such a table bounds, and not in T times B.
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
    """What `causal_attention` gives for q and k repeated over the batch; scores and softmax in float32.

    G KV heads serve H query heads, `window=0` sees everything, `slopes` (one per query head) add -slope * (i - j).
    """
    seq_len, n_heads, head_dim = q_THK.shape
    n_kv = k_SGK.shape[1]
    q_TGRK = q_THK.reshape(seq_len, n_kv, n_heads // n_kv, head_dim)
    s_GRTS = jnp.einsum("tgrk,sgk->grts", q_TGRK, k_SGK, preferred_element_type=jnp.float32)
    s_GRTS = s_GRTS * (head_dim**-0.5 if scale is None else scale)
    ago_TS = jnp.arange(seq_len)[:, None] - jnp.arange(seq_len)
    if slopes:
        s_GRTS -= jnp.asarray(slopes, jnp.float32).reshape(n_kv, -1, 1, 1) * ago_TS
    seen_TS = (ago_TS >= 0) & (ago_TS < (window or seq_len))
    p_GRTS = jax.nn.softmax(jnp.where(seen_TS, s_GRTS, -jnp.inf), axis=-1).astype(v_BSGV.dtype)
    o_BTGRV = jnp.einsum("grts,bsgv->btgrv", p_GRTS, v_BSGV)
    return o_BTGRV.reshape(*v_BSGV.shape[:2], n_heads, v_BSGV.shape[-1])
