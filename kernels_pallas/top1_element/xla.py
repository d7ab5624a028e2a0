"""The `xla` backend of Top-1 Element: any device, any T, O(T) memory.

The forward pass scans the tiles of the causal half and keeps each row's maximum and its key. Tiles ascend and only a
strictly greater score replaces the maximum, so ties go to the smallest key. If a gradient is needed, the pass also
keeps an online softmax and the soft output so = sum_j p_ij v_j. Then o_i = v[m_i], bit for bit. The backward pass
recomputes p = exp(s - lse) per tile:

    D = sum(do * so),  ds = p * (do v^T - D),  dq = scale ds k,  dk = scale ds^T q
    dv: "hard" sums do over the queries with this best key (a segment sum), "soft" is p^T do
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import xla_tiles
from kernels_pallas.backend import Backend
from kernels_pallas.numerics import MASKED, accumulation_dtype
from kernels_pallas.top1_element.interface import ElementAttention, ElementDecoding


def load() -> ElementAttention:
    """Return this module."""
    from kernels_pallas.top1_element import xla

    return xla


def load_decoding() -> ElementDecoding:
    """Return this module."""
    from kernels_pallas.top1_element import xla

    return xla


BACKEND = Backend("xla", load)
DECODE_BACKEND = Backend("xla", load_decoding)


def evaluate(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> Array:
    """Return o_BTHV without computing the softmax or its product with v.

    This halves the work.
    """
    index_BTH, _ = _scan(q_BTHK, k_BTGK, None, scale)
    return take_values(v_BTGV, index_BTH)


def forward(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> tuple[Array, Array, Array]:
    """Return (index_BTH int32, lse_BTH, soft_BTHV).

    The index is the best key. The log-sum-exp and the softmax output are for the backward pass.
    """
    index_BTH, soft = _scan(q_BTHK, k_BTGK, v_BTGV, scale)
    assert soft is not None
    lse_BTH, soft_BTHV = soft
    return index_BTH, lse_BTH, soft_BTHV.astype(v_BTGV.dtype)


def take_values(v_BTGV: Array, index_BTH: Array) -> Array:
    """Return o_BTHV = v[index], exactly."""
    G, H = v_BTGV.shape[2], index_BTH.shape[2]
    index_BGM = xla_tiles.scalar_to_rows(index_BTH, G)
    o_BGMV = jnp.take_along_axis(v_BTGV.transpose(0, 2, 1, 3), index_BGM[..., None], axis=2)
    return xla_tiles.from_rows(o_BGMV, H)


def backward(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    index_BTH: Array,
    lse_BTH: Array,
    soft_BTHV: Array,
    do_BTHV: Array,
    *,
    scale: float,
    v_grad: str,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), each in the layout and dtype of its primal."""
    B, T, H, _ = q_BTHK.shape
    G = k_BTGK.shape[2]
    R, acc = H // G, lse_BTH.dtype
    D_BTH = jnp.sum(do_BTHV.astype(acc) * soft_BTHV.astype(acc), axis=-1)
    plan = xla_tiles.causal_tiles(T, min(T, 64), B * H)
    rows = plan.side * R
    # padded rows have do = 0 and D = 0, so they add nothing for any probabilities
    q_BGMK, do_BGMV = (xla_tiles.pad_to(xla_tiles.to_rows(x, G), plan.padded * R, axis=2) for x in (q_BTHK, do_BTHV))
    lse_BGM, D_BGM = (
        xla_tiles.pad_to(xla_tiles.scalar_to_rows(x, G), plan.padded * R, axis=2) for x in (lse_BTH, D_BTH)
    )
    k_BGSK, v_BGSV = (xla_tiles.pad_to(x.transpose(0, 2, 1, 3), plan.padded, axis=2) for x in (k_BTGK, v_BTGV))

    def visit(carry, tile):
        row, col = tile
        dq_BGMK, dk_BGSK, dv_BGSV = carry
        q_BGmK, do_BGmV, lse_BGm, D_BGm = (xla_tiles.block(x, row, rows) for x in (q_BGMK, do_BGMV, lse_BGM, D_BGM))
        k_BGsK, v_BGsV = (xla_tiles.block(x, col, plan.side) for x in (k_BGSK, v_BGSV))
        s_BGms = scale * _dot("bgmk,bgsk->bgms", q_BGmK, k_BGsK, acc)
        is_past = _is_past(row, col, plan.side, R)
        p_BGms = jnp.where(is_past, jnp.exp(s_BGms - lse_BGm[..., None]), 0)
        dp_BGms = _dot("bgmv,bgsv->bgms", do_BGmV, v_BGsV, acc)
        ds_BGms = (scale * p_BGms * (dp_BGms - D_BGm[..., None])).astype(k_BGsK.dtype)
        if v_grad == "soft":
            dv_BGsV = _dot("bgms,bgmv->bgsv", p_BGms.astype(do_BGmV.dtype), do_BGmV, acc)
            dv_BGSV = xla_tiles.add_block(dv_BGSV, dv_BGsV, col, plan.side)
        dq_BGMK = xla_tiles.add_block(dq_BGMK, _dot("bgms,bgsk->bgmk", ds_BGms, k_BGsK, acc), row, rows)
        dk_BGSK = xla_tiles.add_block(dk_BGSK, _dot("bgms,bgmk->bgsk", ds_BGms, q_BGmK, acc), col, plan.side)
        return (dq_BGMK, dk_BGSK, dv_BGSV), None

    init = tuple(jnp.zeros_like(x, dtype=acc) for x in (q_BGMK, k_BGSK, v_BGSV))
    (dq_BGMK, dk_BGSK, dv_BGSV), _ = jax.lax.scan(visit, init, (plan.rows, plan.cols))
    if v_grad == "hard":
        index_BGM = xla_tiles.scalar_to_rows(index_BTH, G)
        add = jax.vmap(jax.vmap(lambda dv_SV, index_M, do_MV: dv_SV.at[index_M].add(do_MV)))
        dv_BGSV = add(dv_BGSV, index_BGM, xla_tiles.to_rows(do_BTHV, G).astype(acc))
    dk_BTGK, dv_BTGV = (x[:, :, :T].transpose(0, 2, 1, 3) for x in (dk_BGSK, dv_BGSV))
    dq_BTHK = xla_tiles.from_rows(dq_BGMK[:, :, : T * R], H)
    return dq_BTHK.astype(q_BTHK.dtype), dk_BTGK.astype(k_BTGK.dtype), dv_BTGV.astype(v_BTGV.dtype)


def _scan(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array | None, scale: float) -> tuple[Array, tuple | None]:
    """Return the best key per row and, if values are passed, (lse_BTH, soft_BTHV)."""
    B, T, H, _ = q_BTHK.shape
    G = k_BTGK.shape[2]
    R, acc = H // G, accumulation_dtype(q_BTHK, k_BTGK)
    plan = xla_tiles.causal_tiles(T, min(T, 64), B * H)
    rows = plan.side * R
    q_BGMK = xla_tiles.pad_to(xla_tiles.to_rows(q_BTHK, G), plan.padded * R, axis=2)
    k_BGSK = xla_tiles.pad_to(k_BTGK.transpose(0, 2, 1, 3), plan.padded, axis=2)
    zero_BGM = jnp.zeros_like(q_BGMK[..., 0], dtype=acc)
    init = [zero_BGM + MASKED, zero_BGM.astype(jnp.int32)]
    if v_BTGV is not None:
        v_BGSV = xla_tiles.pad_to(v_BTGV.transpose(0, 2, 1, 3), plan.padded, axis=2)
        init += [zero_BGM, zero_BGM[..., None] * jnp.zeros(v_BGSV.shape[-1], acc)]

    def visit(carry, tile):
        row, col = tile
        m_BGm, index_BGm, *soft = (xla_tiles.block(x, row, rows) for x in carry)
        k_BGsK = xla_tiles.block(k_BGSK, col, plan.side)
        s_BGms = scale * _dot("bgmk,bgsk->bgms", xla_tiles.block(q_BGMK, row, rows), k_BGsK, acc)
        is_past = _is_past(row, col, plan.side, R)
        s_BGms = jnp.where(is_past, s_BGms, MASKED)
        top_BGm = s_BGms.max(-1)
        top_key_BGm = col * plan.side + jnp.argmax(s_BGms, axis=-1).astype(jnp.int32)
        new = [jnp.maximum(m_BGm, top_BGm), jnp.where(top_BGm > m_BGm, top_key_BGm, index_BGm)]
        if soft:
            l_BGm, o_BGmV = soft
            v_BGsV = xla_tiles.block(v_BGSV, col, plan.side)
            p_BGms = jnp.where(is_past, jnp.exp(s_BGms - new[0][..., None]), 0)
            decay_BGm = jnp.exp(m_BGm - new[0])
            new.append(decay_BGm * l_BGm + p_BGms.sum(-1))
            pv_BGmV = _dot("bgms,bgsv->bgmv", p_BGms.astype(v_BGsV.dtype), v_BGsV, acc)
            new.append(decay_BGm[..., None] * o_BGmV + pv_BGmV)
        return [xla_tiles.set_block(x, y, row, rows) for x, y in zip(carry, new, strict=True)], None

    (m_BGM, index_BGM, *soft), _ = jax.lax.scan(visit, init, (plan.rows, plan.cols))
    index_BTH = xla_tiles.scalar_from_rows(index_BGM[:, :, : T * R], H)
    if not soft:
        return index_BTH, None
    l_BGM, o_BGMV = soft
    lse_BTH = xla_tiles.scalar_from_rows((m_BGM + jnp.log(l_BGM))[:, :, : T * R], H)
    return index_BTH, (lse_BTH, xla_tiles.from_rows((o_BGMV / l_BGM[..., None])[:, :, : T * R], H))


def _is_past(row: Array, col: Array, side: int, R: int) -> Array:
    """Return [rows, side]: whether the key is not after the query."""
    t_m = row * side + jnp.arange(side * R) // R
    return col * side + jnp.arange(side) <= t_m[:, None]


def _dot(spec: str, a: Array, b: Array, acc: jnp.dtype) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=acc)


def decode(q_BHK: Array, k_BSGK: Array, v_BSGV: Array, length: Array) -> Array:
    """Return o_BHV in one pass over the keys; reads one value per head.

    It needs no scale, because a positive scale does not change the argmax.
    """
    B, H, K = q_BHK.shape
    S, G = k_BSGK.shape[1:3]
    acc = accumulation_dtype(q_BHK, k_BSGK)
    q_BGRK = q_BHK.reshape(B, G, H // G, K)
    s_BGRS = jnp.einsum("bgrk,bsgk->bgrs", q_BGRK, k_BSGK, preferred_element_type=acc)
    index_BGR = jnp.argmax(jnp.where(jnp.arange(S) < length, s_BGRS, MASKED), axis=-1)
    take = jax.vmap(jax.vmap(lambda v_SV, index_R: v_SV[index_R], in_axes=(1, 0)))
    return take(v_BSGV, index_BGR).reshape(B, H, -1)
