"""The `xla` delta rule: chunked matrix products, differentiated by JAX.

Equations: `api.py`. Here X = (I + stril(beta_i k_i.k_j G_ij))^{-1} beta, which includes the decays and beta. W is
affine in S, so one product per chunk is sequential (`state_scan`) and all other products run over all chunks at once.
No exponent that is used is positive. Inverse, decays, beta and states are float32; matrix products use the input dtype.
The backward pass keeps the inputs and, per chunk, one state and one inverse.
"""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.chunks import carry_precision, from_chunks, product, rematerialized, to_chunks
from kernels_pallas.delta_rule.interface import DeltaRule
from kernels_pallas.state_scan.api import state_scan
from kernels_pallas.triangular import unit_lower_inverse


def load() -> DeltaRule:
    """Return this module."""
    from kernels_pallas.delta_rule import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    beta_BTH: Array,
    log_g_BTH: Array | None,
    initial_BHKV: Array,
    *,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Return (o_BTHV, last state)."""
    return _chunked(min(chunk_size, q_BTHK.shape[1]), q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_g_BTH, initial_BHKV)


@rematerialized
def _chunked(chunk: int, q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_g_BTH, s_BHKV) -> tuple[Array, Array]:
    # In the products, i and j index positions within a chunk.
    seq_len, dtype, acc = q_BTHK.shape[1], q_BTHK.dtype, s_BHKV.dtype
    q_cBHCK, k_cBHCK, v_cBHCV = (to_chunks(x, chunk) for x in (q_BTHK, k_BTHK, v_BTHV))
    beta_cBHC = to_chunks(beta_BTH, chunk)
    lower_CC = jnp.tril(jnp.ones((chunk, chunk), bool))
    if log_g_BTH is None:
        ratio_cBHCC, grow_cBHC, decay_to_end_cBHC = 1.0, None, None
        decay_cBH1 = jnp.ones((*beta_cBHC.shape[:3], 1), acc)
    else:
        g_cBHC = jnp.cumsum(to_chunks(log_g_BTH, chunk), -1)
        # Mask before the exponential: above the diagonal, it and its gradient could overflow.
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
