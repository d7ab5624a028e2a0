"""The definition of causal attention, for tests.

Dense: all pairs of positions, in the accumulation dtype.
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.numerics import accumulation_dtype


def causal_attention(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    log_f_BTH: Array | None = None,
    *,
    window: int,
    scale: float,
    slopes: tuple[float, ...],
    segments_BT: Array | None = None,
) -> Array:
    """Return o_BTHV; the arguments are as in `api.causal_attention`."""
    acc = accumulation_dtype(q_BTHK, k_BTGK, v_BTGV)
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K).astype(acc)
    s_BGRTS = scale * jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BTGK.astype(acc))
    distance_TS = jnp.arange(T)[:, None] - jnp.arange(T)
    if slopes:
        s_BGRTS -= jnp.asarray(slopes, acc).reshape(G, -1, 1, 1) * distance_TS
    if log_f_BTH is not None:
        c_BGRT = jnp.cumsum(jnp.moveaxis(log_f_BTH.astype(acc), 1, 2), axis=-1).reshape(B, G, H // G, T)
        s_BGRTS += c_BGRT[..., None] - c_BGRT[..., None, :]
    visible_TS = (distance_TS >= 0) & (distance_TS < (window or T))
    if segments_BT is not None:
        visible_TS &= (segments_BT[:, :, None] == segments_BT[:, None])[:, None, None]
    p_BGRTS = jax.nn.softmax(jnp.where(visible_TS, s_BGRTS, -jnp.inf), axis=-1)
    o_BTGRV = jnp.einsum("bgrts,bsgv->btgrv", p_BGRTS, v_BTGV.astype(acc))
    return o_BTGRV.reshape(B, T, H, -1).astype(v_BTGV.dtype)
