"""Attention to selected chunks as masked attention, for short sequences.

A scan visits the tiles of the causal half with an online softmax. A query sees a key if the key's chunk is selected, or
if the key is in the local chunk and not later. This does the work of full attention, T^2 K, but needs no sort and no
gather. With packed documents, a row sees no key before its document's first token, `start_B1M`. The backward pass scans
the same tiles and recomputes the probabilities from the saved log-sum-exp:

    p = exp(s - lse),  D = sum(do * o),  ds = p * (do v^T - D),  dq = scale ds k,  dk = scale ds^T q,  dv = p^T do
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import xla_tiles
from kernels_pallas.numerics import MASKED, accumulation_dtype


def forward(
    q_BGMK: Array,
    k_BGSK: Array,
    v_BGSV: Array,
    sel_BGMk: Array,
    *,
    chunk_size: int,
    heads_per_group: int,
    scale: float,
    start_B1M: Array | None = None,
) -> tuple[Array, Array]:
    """Return (o_BGMV, lse_BGM), both in the accumulation dtype."""
    acc = accumulation_dtype(q_BGMK, k_BGSK, v_BGSV)
    M, R = q_BGMK.shape[2], heads_per_group
    per_row = (q_BGMK, sel_BGMk) if start_B1M is None else (q_BGMK, sel_BGMk, start_B1M)
    plan, rows, (q_BGMK, *seen), (k_BGSK, v_BGSV) = _plan(per_row, (k_BGSK, v_BGSV), chunk_size, R)

    def visit(carry, tile):
        row, col = tile
        m_BGM, l_BGM, o_BGMV = carry
        v_BGsV = xla_tiles.block(v_BGSV, col, plan.side)
        q_BGmK, *seen_by = (xla_tiles.block(x, row, rows) for x in (q_BGMK, *seen))
        s_BGms = scale * _dot("bgmk,bgsk->bgms", q_BGmK, xla_tiles.block(k_BGSK, col, plan.side), acc)
        is_seen = _is_seen(*seen_by, row=row, col=col, side=plan.side, C=chunk_size, R=R)
        s_BGms = jnp.where(is_seen, s_BGms, MASKED)
        m_BGm = xla_tiles.block(m_BGM, row, rows)
        m_new_BGm = jnp.maximum(m_BGm, s_BGms.max(-1))
        # a row may see no key of a tile: without the mask exp(MASKED - MASKED) would count
        p_BGms = jnp.where(is_seen, jnp.exp(s_BGms - m_new_BGm[..., None]), 0)
        decay_BGm = jnp.exp(m_BGm - m_new_BGm)
        l_BGm = decay_BGm * xla_tiles.block(l_BGM, row, rows) + p_BGms.sum(-1)
        o_BGmV = decay_BGm[..., None] * xla_tiles.block(o_BGMV, row, rows)
        o_BGmV += _dot("bgms,bgsv->bgmv", p_BGms.astype(v_BGsV.dtype), v_BGsV, acc)
        new = zip(carry, (m_new_BGm, l_BGm, o_BGmV), strict=True)
        return tuple(xla_tiles.set_block(x, y, row, rows) for x, y in new), None

    zero_BGM = jnp.zeros_like(q_BGMK[..., 0], dtype=acc)
    init = (zero_BGM + MASKED, zero_BGM, zero_BGM[..., None] * jnp.zeros(v_BGSV.shape[-1], acc))
    (m_BGM, l_BGM, o_BGMV), _ = jax.lax.scan(visit, init, (plan.rows, plan.cols))
    return (o_BGMV / l_BGM[..., None])[:, :, :M], (m_BGM + jnp.log(l_BGM))[:, :, :M]


def backward(
    q_BGMK: Array,
    k_BGSK: Array,
    v_BGSV: Array,
    sel_BGMk: Array,
    lse_BGM: Array,
    D_BGM: Array,
    do_BGMV: Array,
    *,
    chunk_size: int,
    heads_per_group: int,
    scale: float,
    start_B1M: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return (dq_BGMK, dk_BGSK, dv_BGSV) in the accumulation dtype."""
    acc = accumulation_dtype(q_BGMK, k_BGSK, v_BGSV)
    M, S, R = q_BGMK.shape[2], k_BGSK.shape[2], heads_per_group
    # padded rows have do = 0 and D = 0, so they add nothing for any probabilities
    seen = (sel_BGMk,) if start_B1M is None else (sel_BGMk, start_B1M)
    plan, rows, per_row, (k_BGSK, v_BGSV) = _plan(
        (q_BGMK, lse_BGM, D_BGM, do_BGMV, *seen), (k_BGSK, v_BGSV), chunk_size, R
    )

    def visit(carry, tile):
        row, col = tile
        dq_BGMK, dk_BGSK, dv_BGSV = carry
        q_BGmK, lse_BGm, D_BGm, do_BGmV, *seen_by = (xla_tiles.block(x, row, rows) for x in per_row)
        k_BGsK, v_BGsV = (xla_tiles.block(x, col, plan.side) for x in (k_BGSK, v_BGSV))
        s_BGms = scale * _dot("bgmk,bgsk->bgms", q_BGmK, k_BGsK, acc)
        is_seen = _is_seen(*seen_by, row=row, col=col, side=plan.side, C=chunk_size, R=R)
        p_BGms = jnp.where(is_seen, jnp.exp(s_BGms - lse_BGm[..., None]), 0)
        dp_BGms = _dot("bgmv,bgsv->bgms", do_BGmV, v_BGsV, acc)
        ds_BGms = (scale * p_BGms * (dp_BGms - D_BGm[..., None])).astype(k_BGsK.dtype)
        dv_BGsV = _dot("bgms,bgmv->bgsv", p_BGms.astype(do_BGmV.dtype), do_BGmV, acc)
        dq_BGMK = xla_tiles.add_block(dq_BGMK, _dot("bgms,bgsk->bgmk", ds_BGms, k_BGsK, acc), row, rows)
        dk_BGSK = xla_tiles.add_block(dk_BGSK, _dot("bgms,bgmk->bgsk", ds_BGms, q_BGmK, acc), col, plan.side)
        return (dq_BGMK, dk_BGSK, xla_tiles.add_block(dv_BGSV, dv_BGsV, col, plan.side)), None

    init = tuple(jnp.zeros_like(x, dtype=acc) for x in (per_row[0], k_BGSK, v_BGSV))
    (dq_BGMK, dk_BGSK, dv_BGSV), _ = jax.lax.scan(visit, init, (plan.rows, plan.cols))
    return dq_BGMK[:, :, :M], dk_BGSK[:, :, :S], dv_BGSV[:, :, :S]


def _plan(per_row: tuple, per_key: tuple, chunk_size: int, R: int) -> tuple:
    B, G, S = per_key[0].shape[:3]
    plan = xla_tiles.causal_tiles(S, chunk_size, B * G * R)
    per_row = tuple(xla_tiles.pad_to(x, plan.padded * R, axis=2) for x in per_row)
    per_key = tuple(xla_tiles.pad_to(x, plan.padded, axis=2) for x in per_key)
    return plan, plan.side * R, per_row, per_key


def _is_seen(
    sel_BGmk: Array, start_B1m: Array | None = None, *, row: Array, col: Array, side: int, C: int, R: int
) -> Array:
    """Return [B, G, rows, side]: whether the query sees the key.

    True for keys in a selected chunk, and in the local chunk up to the query.
    """
    t_m = row * side + jnp.arange(side * R) // R
    s_s = col * side + jnp.arange(side)
    is_local_ms = (s_s // C == t_m[:, None] // C) & (s_s <= t_m[:, None])
    is_seen_BGms = is_local_ms
    for rank in range(sel_BGmk.shape[-1]):
        is_seen_BGms |= sel_BGmk[..., rank, None] == s_s // C
    return is_seen_BGms if start_B1m is None else is_seen_BGms & (s_s >= start_B1m[..., None])


def _dot(spec: str, a: Array, b: Array, acc: jnp.dtype) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=acc)
