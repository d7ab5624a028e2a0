"""The (gated) delta rule: a linear-attention state that is corrected towards each value.

    S_t = e^{g_t} S_{t-1} + k_t (x) beta_t (v_t - k_t^T e^{g_t} S_{t-1}),   y_t = q_t^T S_t,   S [K, V], float32

See DeltaNet (arXiv 2406.06484, g = 0) and Gated DeltaNet (arXiv 2412.06464); public code: flash-linear-attention,
`fla/ops/{delta_rule,gated_delta_rule}/naive.py`. In a chunk, with g summed from its start and G_ij = e^{g_i - g_j},

    X = (I + stril(beta_i k_i.k_j G_ij))^{-1},   W = X beta (V - e^g K S),
    Y = e^g Q S + tril(Q K^T G) W,               S <- e^{g_C} S + (e^{g_C - g} K)^T W.

W is affine in S, so all products but one per chunk run over all chunks at once (`state_scan`). Exponents are never
positive where they are used. The inverse, decays, beta and states are float32, products take the dtype of the inputs.
"""

import jax.numpy as jnp
from jaxtyping import Float

from kernels_pallas import accumulation_dtype, state_scan
from seqjax.ops.chunked import carry_precision, from_chunks, product, rematerialized, to_chunks
from seqjax.ops.triangular import unit_lower_inverse
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 64


def gated_delta_rule(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    beta_BTH: Float[Array, "B T H"],
    log_g_BTH: Float[Array, "B T H"] | None = None,
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs in the dtype of `q_BTHK`, and with `return_state` the final state in at least float32.

    `q_BTHK` must be scaled and `k_BTHK` of unit norm; `beta_BTH` is in [0, 2] and `log_g_BTH` <= 0. The result does not
    depend on `chunk_size` (default 64, at most T), but time and memory do. The inputs and one state and one inverse per
    chunk are saved for the backward pass.
    """
    n_batch, seq_len, n_heads, key_dim = q_BTHK.shape
    acc = accumulation_dtype(q_BTHK)
    shape = (n_batch, n_heads, key_dim, v_BTHV.shape[-1])
    s_BHKV = jnp.zeros(shape, acc) if initial_state is None else initial_state.astype(acc)
    chunk = min(chunk_size or CHUNK, seq_len)
    q_BTHK, k_BTHK, v_BTHV, beta_BTH = (time_to_heads(x) for x in (q_BTHK, k_BTHK, v_BTHV, beta_BTH))
    log_g_BTH = None if log_g_BTH is None else time_to_heads(log_g_BTH)
    o_BTHV, s_BHKV = _chunked(chunk, q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_g_BTH, s_BHKV)
    o_BTHV = heads_to_time(o_BTHV)
    return (o_BTHV, s_BHKV) if return_state else o_BTHV


@rematerialized
def _chunked(chunk: int, q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_g_BTH, s_BHKV) -> tuple[Array, Array]:
    # In the products, i and j index positions within a chunk.
    seq_len, dtype, acc = q_BTHK.shape[1], q_BTHK.dtype, s_BHKV.dtype
    q_cBHCK, k_cBHCK, v_cBHCV = (to_chunks(x, chunk) for x in (q_BTHK, k_BTHK.astype(dtype), v_BTHV.astype(dtype)))
    beta_cBHC = to_chunks(beta_BTH.astype(acc), chunk)
    lower_CC = jnp.tril(jnp.ones((chunk, chunk), bool))
    if log_g_BTH is None:
        ratio_cBHCC, grow_cBHC, decay_to_end_cBHC = 1.0, None, None
        decay_cBH1 = jnp.ones((*beta_cBHC.shape[:3], 1), acc)
    else:
        g_cBHC = jnp.cumsum(to_chunks(log_g_BTH.astype(acc), chunk), -1)
        # Masked before the exponential, because above the diagonal it and its gradient could overflow.
        ratio_cBHCC = jnp.exp(jnp.where(lower_CC, g_cBHC[..., :, None] - g_cBHC[..., None, :], -jnp.inf))
        grow_cBHC, decay_to_end_cBHC = jnp.exp(g_cBHC), jnp.exp(g_cBHC[..., -1:] - g_cBHC)
        decay_cBH1 = grow_cBHC[..., -1:]

    keys_cBHCC = product("...ik,...jk->...ij", k_cBHCK, k_cBHCK) * ratio_cBHCC * beta_cBHC[..., :, None]
    x_cBHCC = unit_lower_inverse(jnp.where(jnp.tril(lower_CC, -1), keys_cBHCC, 0)) * beta_cBHC[..., None, :]
    u_cBHCV = product("...ij,...jv->...iv", x_cBHCC.astype(dtype), v_cBHCV)
    # W = U - E S
    e_cBHCK = product("...ij,...jk->...ik", _scaled_columns(x_cBHCC, grow_cBHC).astype(dtype), k_cBHCK).astype(dtype)
    k_out_cBHCK = _scaled_rows(k_cBHCK, decay_to_end_cBHC)
    p_cBHKK = -product("...ik,...ij->...kj", k_out_cBHCK, e_cBHCK)
    r_cBHKV = product("...ik,...iv->...kv", k_out_cBHCK, u_cBHCV.astype(dtype))
    starts_cBHKV, final_BHKV = state_scan(decay_cBH1, p_cBHKK, r_cBHKV, s_BHKV, precision=carry_precision(dtype))

    starts_cBHKV = starts_cBHKV.astype(dtype)
    w_cBHCV = (u_cBHCV - product("...ik,...kv->...iv", e_cBHCK, starts_cBHKV)).astype(dtype)
    scores_cBHCC = product("...ik,...jk->...ij", q_cBHCK, k_cBHCK) * ratio_cBHCC
    scores_cBHCC = jnp.where(lower_CC, scores_cBHCC, 0).astype(dtype)
    o_cBHCV = product("...ik,...kv->...iv", _scaled_rows(q_cBHCK, grow_cBHC), starts_cBHKV)
    o_cBHCV = o_cBHCV + product("...ij,...jv->...iv", scores_cBHCC, w_cBHCV)
    return from_chunks(o_cBHCV.astype(dtype), seq_len), final_BHKV


def _scaled_columns(x: Array, by: Array | None) -> Array:
    return x if by is None else x * by[..., None, :]


def _scaled_rows(x: Array, by: Array | None) -> Array:
    return x if by is None else (x * by[..., :, None]).astype(x.dtype)


def gated_delta_rule_step(
    q_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    beta_BH: Float[Array, "B H"],
    log_g_BH: Float[Array, "B H"] | None,
    s_BHKV: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Return the output, in the dtype of `q_BHK`, and the state after one step, computed in the dtype of the state."""
    dtype, acc = q_BHK.dtype, s_BHKV.dtype
    q_BHK, k_BHK, v_BHV, beta_BH = (x.astype(acc) for x in (q_BHK, k_BHK, v_BHV, beta_BH))
    if log_g_BH is not None:
        s_BHKV = s_BHKV * jnp.exp(log_g_BH.astype(acc))[..., None, None]
    # Sums and not products of matrices with one row, so that XLA makes one loop over the state of each line.
    w_BHV = beta_BH[..., None] * (v_BHV - jnp.sum(k_BHK[..., None] * s_BHKV, axis=-2))
    s_BHKV = s_BHKV + k_BHK[..., :, None] * w_BHV[..., None, :]
    return jnp.sum(q_BHK[..., None] * s_BHKV, axis=-2).astype(dtype), s_BHKV
