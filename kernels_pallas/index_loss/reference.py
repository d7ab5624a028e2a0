"""The index loss computed from its definition; the oracle of the tests.

Dense, O(T^2). JAX differentiates it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def index_loss(
    index_q_BTGN: Float[Array, "B T G N"],
    index_k_BTN: Float[Array, "B T N"],
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    sel_BTGn: Int32[Array, "B T G n"],
    *,
    block_size: int,
) -> Float[Array, ""]:
    """Compute `kernels_pallas.index_loss` in the accumulation dtype."""
    wide = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    index_q_BTGN, index_k_BTN, q_BTHK, k_BTGK = (x.astype(wide) for x in (index_q_BTGN, index_k_BTN, q_BTHK, k_BTGK))
    B, T, H, K = q_BTHK.shape
    G, N = index_q_BTGN.shape[2:]
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
    s_BTGRS = K**-0.5 * jnp.einsum("btgrk,bsgk->btgrs", q_BTGRK, k_BTGK, precision="highest")
    i_BTGS = N**-0.5 * jnp.einsum("btgn,bsn->btgs", index_q_BTGN, index_k_BTN, precision="highest")
    block_S = jnp.arange(T) // block_size
    is_own_T1S = (block_S == block_S[:, None])[:, None]
    is_read_BTGS = (sel_BTGn[..., None] == block_S).any(-2) | is_own_T1S
    is_read_BTGS &= (jnp.arange(T) <= jnp.arange(T)[:, None])[:, None]
    p_BTGRS = jax.nn.softmax(jnp.where(is_read_BTGS[:, :, :, None], s_BTGRS, -jnp.inf), axis=-1)
    p_BTGS = jax.lax.stop_gradient(p_BTGRS.mean(3))
    log_r_BTGS = jax.nn.log_softmax(jnp.where(is_read_BTGS, i_BTGS, -1e30), axis=-1)
    log_p_BTGS = jnp.log(jnp.where(p_BTGS > 0, p_BTGS, 1.0))
    return jnp.where(p_BTGS > 0, p_BTGS * (log_p_BTGS - log_r_BTGS), 0.0).sum(-1).mean()
