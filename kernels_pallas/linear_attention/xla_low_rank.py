"""The `xla` backend with a low-rank part, differentiated by JAX except scores.

Equations: `api.py`. If a chunk's sum of log w stays above -80, the exponential splits into a factor of i and a factor
of j, one of which grows: RWKV-7's log w > -0.6066 allows C <= 128. For other decays, as in KDA, the scores come from
`xla_scores.py`, whose exponents are at most 0.

U is affine in S. One product per chunk is therefore sequential (`state_scan`), and all other products run over all
chunks at once. The backward pass keeps the inputs and, per chunk, one state and one inverse.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from kernels_pallas.chunks import carry_precision, from_chunks, product, rematerialized, to_chunks
from kernels_pallas.linear_attention.interface import every_decay
from kernels_pallas.linear_attention.xla_scores import decayed_scores
from kernels_pallas.state_scan.api import state_scan
from kernels_pallas.triangular import unit_lower_inverse

STRONGEST = -80.0  # bound of a chunk's sum of log w: e^80 leaves room in float32 for its factors


def _chunked(
    is_mild: bool, chunk: int, r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, a_BTHK, b_BTHK, s_BHKV
) -> tuple[Array, Array]:
    """Return (o_BTHV, last state); b None means that b is k."""
    # In the products, i and j index positions within a chunk.
    seq_len, dtype, acc = v_BTHV.shape[1], v_BTHV.dtype, s_BHKV.dtype
    r_cBHCK, k_cBHCK, v_cBHCV, a_cBHCK = (to_chunks(x.astype(dtype), chunk) for x in (r_BTHK, k_BTHK, v_BTHV, a_BTHK))
    writers = (k_cBHCK,) if b_BTHK is None else (k_cBHCK, to_chunks(b_BTHK.astype(dtype), chunk))
    log_w_cBHCK = to_chunks(every_decay(log_w_BTHK.astype(acc), r_BTHK), chunk)
    g_cBHCK = jnp.cumsum(log_w_cBHCK, -2)
    if is_mild:
        before_cBHCK = g_cBHCK - log_w_cBHCK
        scores = _mild_scores(r_cBHCK, a_cBHCK, writers, before_cBHCK, g_cBHCK)
    else:
        # With large sums, g - log_w differs by rounding from the sum that the previous position writes with.
        before_cBHCK = jnp.roll(g_cBHCK, 1, -2).at[..., 0, :].set(0)
        scores = _scores(r_cBHCK, a_cBHCK, writers, before_cBHCK, g_cBHCK)
    (n_rk_cBHCC, *_), (m_ak_cBHCC, *_) = scores
    n_rb_cBHCC, m_ab_cBHCC = scores[0][-1], scores[1][-1]
    n_rk_cBHCC, n_rb_cBHCC, m_ak_cBHCC = (x.astype(dtype) for x in (n_rk_cBHCC, n_rb_cBHCC, m_ak_cBHCC))

    a_in_cBHCK = (a_cBHCK * jnp.exp(before_cBHCK)).astype(dtype)
    r_in_cBHCK = (r_cBHCK * jnp.exp(g_cBHCK)).astype(dtype)
    decay_to_end_cBHCK = jnp.exp(g_cBHCK[..., -1:, :] - g_cBHCK)
    k_out_cBHCK, b_out_cBHCK = ((writers[i] * decay_to_end_cBHCK).astype(dtype) for i in (0, -1))

    x_cBHCC = unit_lower_inverse(-m_ab_cBHCC).astype(dtype)
    # U = u + E S
    u_cBHCV = product("...ij,...jv->...iv", m_ak_cBHCC, v_cBHCV).astype(dtype)
    u_cBHCV = product("...ij,...jv->...iv", x_cBHCC, u_cBHCV)
    e_cBHCK = product("...ij,...jk->...ik", x_cBHCC, a_in_cBHCK).astype(dtype)
    p_cBHKK = product("...ik,...ij->...kj", b_out_cBHCK, e_cBHCK)
    add_cBHKV = product("...ik,...iv->...kv", k_out_cBHCK, v_cBHCV)
    add_cBHKV = add_cBHKV + product("...ik,...iv->...kv", b_out_cBHCK, u_cBHCV.astype(dtype))
    decay_cBHK = jnp.exp(g_cBHCK[..., -1, :])
    starts_cBHKV, final_BHKV = state_scan(decay_cBHK, p_cBHKK, add_cBHKV, s_BHKV, precision=carry_precision(dtype))

    starts_cBHKV = starts_cBHKV.astype(dtype)
    u_cBHCV = (u_cBHCV + product("...ik,...kv->...iv", e_cBHCK, starts_cBHKV)).astype(dtype)
    o_cBHCV = product("...ik,...kv->...iv", r_in_cBHCK, starts_cBHKV)
    o_cBHCV = o_cBHCV + product("...ij,...jv->...iv", n_rk_cBHCC, v_cBHCV)
    o_cBHCV = o_cBHCV + product("...ij,...jv->...iv", n_rb_cBHCC, u_cBHCV)
    return from_chunks(o_cBHCV.astype(dtype), seq_len), final_BHKV


mild_decays = rematerialized(partial(_chunked, True))
any_decays = rematerialized(partial(_chunked, False))


def _mild_scores(r: Array, a: Array, writers: tuple[Array, ...], before: Array, g: Array) -> tuple[list[Array], ...]:
    """Return the scores of r and of a with each writer, [..., C, C].

    Each score is a product with factors e^{g} and e^{-g}, which must not overflow.
    """
    upto_CC = jnp.tril(jnp.ones((r.shape[-2], r.shape[-2]), bool))
    past_CC = jnp.tril(upto_CC, -1)
    shrunk = [(y * jnp.exp(-g)).astype(y.dtype) for y in writers]
    readers = ((r * jnp.exp(g)).astype(r.dtype), upto_CC), ((a * jnp.exp(before)).astype(a.dtype), past_CC)
    return tuple([jnp.where(mask_CC, product("...ik,...jk->...ij", x, y), 0) for y in shrunk] for x, mask_CC in readers)


def _scores(r: Array, a: Array, writers: tuple[Array, ...], before: Array, g: Array) -> tuple[list[Array], ...]:
    """Return the scores of `_mild_scores` for decays of any strength."""
    dtype, eye_CC = r.dtype, jnp.eye(r.shape[-2], dtype=g.dtype)
    r, a, *wide = (x.astype(g.dtype) for x in (r, a, *writers))
    of_r: Any = [decayed_scores(r, y, g, g, dtype) for y in wide]
    of_r = [scores + jnp.sum(r * y, axis=-1)[..., None] * eye_CC for scores, y in zip(of_r, wide, strict=True)]
    return of_r, [decayed_scores(a, y, before, g, dtype) for y in wide]
