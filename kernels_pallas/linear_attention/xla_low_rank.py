"""Linear attention with a decay per channel and a low-rank part on XLA: RWKV-7's form, differentiated by JAX.

Equations in `api.py`. The exponential is split into factors of i and of j, one of which grows: a chunk of C positions
may not decay by more than e^-80 in all. RWKV-7's log w > -0.6066 allows C <= 128. U is affine in S, so all products but
one per chunk run over all chunks at once (`state_scan`). The inputs and one state and one inverse per chunk are saved
for the backward pass.
"""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.chunks import carry_precision, from_chunks, product, rematerialized, to_chunks
from kernels_pallas.linear_attention.interface import every_decay
from kernels_pallas.state_scan.api import state_scan
from kernels_pallas.triangular import unit_lower_inverse


@rematerialized
def chunked(chunk: int, r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, a_BTHK, b_BTHK, s_BHKV) -> tuple[Array, Array]:
    """Return (o_BTHV, the last state)."""
    # In the products, i and j index positions within a chunk.
    seq_len, dtype, acc = v_BTHV.shape[1], v_BTHV.dtype, s_BHKV.dtype
    r_cBHCK, k_cBHCK, v_cBHCV, a_cBHCK, b_cBHCK = (
        to_chunks(x.astype(dtype), chunk) for x in (r_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK)
    )
    log_w_cBHCK = to_chunks(every_decay(log_w_BTHK.astype(acc), r_BTHK), chunk)
    g_cBHCK = jnp.cumsum(log_w_cBHCK, -2)
    grow_cBHCK, shrink_cBHCK = jnp.exp(g_cBHCK), jnp.exp(-g_cBHCK)
    decay_to_end_cBHCK = jnp.exp(g_cBHCK[..., -1:, :] - g_cBHCK)
    a_in_cBHCK = (a_cBHCK * jnp.exp(g_cBHCK - log_w_cBHCK)).astype(dtype)
    r_in_cBHCK = (r_cBHCK * grow_cBHCK).astype(dtype)
    k_in_cBHCK, b_in_cBHCK = (k_cBHCK * shrink_cBHCK).astype(dtype), (b_cBHCK * shrink_cBHCK).astype(dtype)
    k_out_cBHCK = (k_cBHCK * decay_to_end_cBHCK).astype(dtype)
    b_out_cBHCK = (b_cBHCK * decay_to_end_cBHCK).astype(dtype)

    lower_CC = jnp.tril(jnp.ones((chunk, chunk), bool))
    before_CC = jnp.tril(lower_CC, -1)
    m_ab_cBHCC = jnp.where(before_CC, product("...ik,...jk->...ij", a_in_cBHCK, b_in_cBHCK), 0)
    m_ak_cBHCC = jnp.where(before_CC, product("...ik,...jk->...ij", a_in_cBHCK, k_in_cBHCK), 0).astype(dtype)
    n_rk_cBHCC = jnp.where(lower_CC, product("...ik,...jk->...ij", r_in_cBHCK, k_in_cBHCK), 0).astype(dtype)
    n_rb_cBHCC = jnp.where(lower_CC, product("...ik,...jk->...ij", r_in_cBHCK, b_in_cBHCK), 0).astype(dtype)

    x_cBHCC = unit_lower_inverse(-m_ab_cBHCC).astype(dtype)
    # U = u + E S
    u_cBHCV = product("...ij,...jv->...iv", m_ak_cBHCC, v_cBHCV).astype(dtype)
    u_cBHCV = product("...ij,...jv->...iv", x_cBHCC, u_cBHCV)
    e_cBHCK = product("...ij,...jk->...ik", x_cBHCC, a_in_cBHCK).astype(dtype)
    p_cBHKK = product("...ik,...ij->...kj", b_out_cBHCK, e_cBHCK)
    add_cBHKV = product("...ik,...iv->...kv", k_out_cBHCK, v_cBHCV)
    add_cBHKV = add_cBHKV + product("...ik,...iv->...kv", b_out_cBHCK, u_cBHCV.astype(dtype))
    decay_cBHK = grow_cBHCK[..., -1, :]
    starts_cBHKV, final_BHKV = state_scan(decay_cBHK, p_cBHKK, add_cBHKV, s_BHKV, precision=carry_precision(dtype))

    starts_cBHKV = starts_cBHKV.astype(dtype)
    u_cBHCV = (u_cBHCV + product("...ik,...kv->...iv", e_cBHCK, starts_cBHKV)).astype(dtype)
    o_cBHCV = product("...ik,...kv->...iv", r_in_cBHCK, starts_cBHKV)
    o_cBHCV = o_cBHCV + product("...ij,...jv->...iv", n_rk_cBHCC, v_cBHCV)
    o_cBHCV = o_cBHCV + product("...ij,...jv->...iv", n_rb_cBHCC, u_cBHCV)
    return from_chunks(o_cBHCV.astype(dtype), seq_len), final_BHKV
