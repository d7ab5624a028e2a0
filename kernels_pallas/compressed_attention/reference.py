"""The compressed attention computed from its definition; the oracle of the tests.

JAX differentiates it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def compressed_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_mean_BcGK: Float[Array, "B c G K"],
    v_mean_BcGV: Float[Array, "B c G V"],
    *,
    block_size: int,
    top_k: int,
) -> tuple[Float[Array, "B T H V"], Int32[Array, "B T G n"]]:
    """Compute `kernels_pallas.compressed_attention` in the accumulation dtype, for at least one block."""
    wide = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    q_BTHK, k_mean_BcGK, v_mean_BcGV = (x.astype(wide) for x in (q_BTHK, k_mean_BcGK, v_mean_BcGV))
    p_BTGRc = weights(q_BTHK, k_mean_BcGK, block_size=block_size)
    o_BTGRV = jnp.einsum("btgrc,bcgv->btgrv", p_BTGRc, v_mean_BcGV, precision="highest")
    block_c, own_T11 = jnp.arange(k_mean_BcGK.shape[1]), (jnp.arange(q_BTHK.shape[1]) // block_size)[:, None, None]
    score_BTGc = jnp.where((block_c == 0) | (block_c == own_T11 - 1), 2.0, p_BTGRc.mean(3))
    score_BTGc = jnp.where(block_c < own_T11, score_BTGc, -1.0)
    n = min(top_k, len(block_c))
    best_BTGn = jnp.argsort(-score_BTGc, axis=-1, stable=True)[..., :n].astype(jnp.int32)
    is_past_BTGn = jnp.take_along_axis(score_BTGc, best_BTGn, axis=-1) >= 0
    return o_BTGRV.reshape(*q_BTHK.shape[:3], -1), jnp.where(is_past_BTGn, best_BTGn, -1)


def weights(q_BTHK: jax.Array, k_mean_BcGK: jax.Array, *, block_size: int) -> jax.Array:
    """Return the softmax weights [B, T, G, R, c], 0 for blocks that end after the query."""
    B, T, _, K = q_BTHK.shape
    c, G = k_mean_BcGK.shape[1:3]
    s_BTGRc = K**-0.5 * jnp.einsum(
        "btgrk,bcgk->btgrc", q_BTHK.reshape(B, T, G, -1, K), k_mean_BcGK, precision="highest"
    )
    is_complete_T11c = ((jnp.arange(c) + 1) * block_size <= jnp.arange(T)[:, None] + 1)[:, None, None]
    p_BTGRc = jax.nn.softmax(jnp.where(is_complete_T11c, s_BTGRc, -1e30), axis=-1)
    return jnp.where(is_complete_T11c, p_BTGRc, 0.0)
