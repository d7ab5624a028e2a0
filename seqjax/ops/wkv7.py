"""The core of RWKV-7: a state with a decay per channel and a rank-one correction.

    S_t = diag(e^{lw_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,   y_t = r_t^T S_t,   S [K, V], float32

RWKV-7 (arXiv 2503.14456; public implementation: BlinkDL/RWKV-LM, RWKV-v7) uses a = -kappa and b = kappa * eta. In a
chunk, with g the inclusive sum of lw from its start to a position, ge the exclusive one, M over j < i, N over j <= i,

    U = (I - M_ab)^{-1} (M_ak V + (a e^{ge}) S),   Y = (r e^g) S + N_rk V + N_rb U,
    S <- diag(e^{g_C}) S + (k e^{g_C - g})^T V + (b e^{g_C - g})^T U,

M_ab[i, j] = sum_n a_i b_j e^{ge_i - g_j} and so on. The exponential is split into factors of i and of j, one of which
grows: a chunk of C positions may not decay by more than e^-80 in all. RWKV-7's lw > -0.6066 allows C <= 128; the
default is 64. U is affine in S, so all products but one per chunk run over all chunks at once (`state_scan`).
"""

import jax.numpy as jnp
from jaxtyping import Float

from kernels_pallas import (
    accumulation_dtype,
    carry_precision,
    from_chunks,
    product,
    rematerialized,
    state_scan,
    to_chunks,
    unit_lower_inverse,
)
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 64


def wkv7(
    r_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_w_BTHK: Float[Array, "B T H K"],
    a_BTHK: Float[Array, "B T H K"],
    b_BTHK: Float[Array, "B T H K"],
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs in the dtype of `r_BTHK`, and with `return_state` the final state in at least float32.

    `log_w_BTHK` is at most 0, and its sum over a chunk must be above -80. The key index of the state comes first (it is
    last in RWKV's own code). The inputs and one state and one inverse per chunk are saved for the backward pass.
    """
    n_batch, seq_len, n_heads, key_dim = r_BTHK.shape
    acc = accumulation_dtype(r_BTHK)
    shape = (n_batch, n_heads, key_dim, v_BTHV.shape[-1])
    s_BHKV = jnp.zeros(shape, acc) if initial_state is None else initial_state.astype(acc)
    if seq_len == 1 and return_state:  # decoding: without chunks, only the state is read and written
        r_BHK, k_BHK, v_BHV = r_BTHK[:, 0], k_BTHK[:, 0], v_BTHV[:, 0]
        log_w_BHK, a_BHK, b_BHK = log_w_BTHK[:, 0], a_BTHK[:, 0], b_BTHK[:, 0]
        o_BHV, s_BHKV = wkv7_step(r_BHK, k_BHK, v_BHV, log_w_BHK, a_BHK, b_BHK, s_BHKV)
        return o_BHV[:, None], s_BHKV
    chunk = min(chunk_size or CHUNK, seq_len)
    operands = [time_to_heads(x) for x in (r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, a_BTHK, b_BTHK)]
    o_BTHV, s_BHKV = _chunked(chunk, *operands, s_BHKV)
    o_BTHV = heads_to_time(o_BTHV)
    return (o_BTHV, s_BHKV) if return_state else o_BTHV


@rematerialized
def _chunked(chunk: int, r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, a_BTHK, b_BTHK, s_BHKV) -> tuple[Array, Array]:
    # In the products, i and j index positions within a chunk.
    seq_len, dtype, acc = r_BTHK.shape[1], r_BTHK.dtype, s_BHKV.dtype
    r_cBHCK, k_cBHCK, v_cBHCV, a_cBHCK, b_cBHCK = (
        to_chunks(x.astype(dtype), chunk) for x in (r_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK)
    )
    log_w_cBHCK = to_chunks(log_w_BTHK.astype(acc), chunk)
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


def wkv7_step(
    r_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    log_w_BHK: Float[Array, "B H K"],
    a_BHK: Float[Array, "B H K"],
    b_BHK: Float[Array, "B H K"],
    s_BHKV: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Return the output, in the dtype of `r_BHK`, and the state after one step, computed in the dtype of the state."""
    dtype, acc = r_BHK.dtype, s_BHKV.dtype
    r_BHK, k_BHK, v_BHV, log_w_BHK, a_BHK, b_BHK = (
        x.astype(acc) for x in (r_BHK, k_BHK, v_BHV, log_w_BHK, a_BHK, b_BHK)
    )
    # Sums and not products of matrices with one row, so that XLA makes one loop over the state of each line.
    correction_BHV = jnp.sum(a_BHK[..., None] * s_BHKV, axis=-2)
    s_BHKV = jnp.exp(log_w_BHK)[..., None] * s_BHKV + b_BHK[..., :, None] * correction_BHV[..., None, :]
    s_BHKV = s_BHKV + k_BHK[..., :, None] * v_BHV[..., None, :]
    return jnp.sum(r_BHK[..., None] * s_BHKV, axis=-2).astype(dtype), s_BHKV
