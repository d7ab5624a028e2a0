"""The `chunked` backend of causal attention: any device, any T, O(T) memory.

A scan visits the square tiles of the score matrix that the mask leaves nonempty; one tile exists at a time
(`kernels_pallas.xla_tiles`). The forward pass keeps a running maximum m and sum l per row, as in flash attention (arXiv
2205.14135, algorithm 1):

    m' = max(m, max_j s_ij),  l' = e^(m - m') l + sum_j e^(s_ij - m'),  o' = e^(m - m') o + sum_j e^(s_ij - m') v_j

The backward pass scans the same tiles and recomputes the probabilities from the log-sum-exp:

    p = exp(s - lse),  D = sum(do * o),  ds = p * (do v^T - D),  dq = scale ds k,  dk = scale ds^T q,  dv = p^T do

The forget gates f of a query head add g_ij, the sum of log f over positions j + 1 to i. One running sum over the whole
past would leave few digits for near keys: at 100,000 tokens it may be -70,000, where float32 values are 0.008 apart.
Sums therefore restart in every tile. Between tiles, g_ij adds the rest of the key's tile, the whole tiles between, and
the query's tile up to the query; none of these is positive, so nothing cancels. Within a tile it is a difference. The
gate gradient uses the row sums r and column sums c of ds (without `scale`):

    dlog f_l = sum over i >= l > j of ds_ij = sum over i >= l of (r_i - c_i)

r is zero up to rounding, but without it the rounding errors of all later rows would add up. With packed documents
(documents.py) a tile's mask also compares documents, and both sums restart at each document. Scores, sums and gradients
are accumulated in float32; probabilities are rounded to the dtype of v before products.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from kernels_pallas import xla_tiles
from kernels_pallas.attention import documents
from kernels_pallas.attention.interface import CausalAttention
from kernels_pallas.backend import Backend
from kernels_pallas.numerics import MASKED, accumulation_dtype
from kernels_pallas.segments import first_tokens

# Minimal side of a tile, in positions.
UNIT = 64


class Options(NamedTuple):
    """The static arguments of a call."""

    window: int
    scale: float
    slopes: tuple[float, ...]


def load() -> CausalAttention:
    """Return this module."""
    from kernels_pallas.attention import chunked

    return chunked


BACKEND = Backend("chunked", load)


def attend(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    log_f_BTH: Array | None = None,
    *,
    window: int,
    scale: float,
    slopes: tuple[float, ...],
    split: PartitionSpec | None = None,
    segments_BT: Array | None = None,
) -> Array:
    """Return o_BTHV in the dtype of v.

    XLA can shard this by itself, because batch and heads stay separate axes. Reverse mode only, once. The residuals
    have the checkpoint names `attention_out` and `attention_lse` for rematerialisation policies.
    """
    del split
    return _attention(q_BTHK, k_BTGK, v_BTGK, log_f_BTH, segments_BT, Options(window, scale, slopes))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    log_f_BTH: Array | None,
    segments_BT: Array | None,
    options: Options,
) -> Array:
    return _scan_forward(q_BTHK, k_BTGK, v_BTGV, log_f_BTH, segments_BT, options)[0]


def _forward(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    log_f_BTH: Array | None,
    segments_BT: Array | None,
    options: Options,
) -> tuple[Array, tuple]:
    o_BTHV, lse_BGM = _scan_forward(q_BTHK, k_BTGK, v_BTGV, log_f_BTH, segments_BT, options)
    o_BTHV, lse_BGM = checkpoint_name(o_BTHV, "attention_out"), checkpoint_name(lse_BGM, "attention_lse")
    return o_BTHV, (q_BTHK, k_BTGK, v_BTGV, log_f_BTH, segments_BT, o_BTHV, lse_BGM)


class GateSums(NamedTuple):
    """Log-gate sums of a query head within a tile of positions."""

    until_BGM: Array  # up to and including the position
    after_BGM: Array  # after the position
    whole_BGRn: Array  # the whole tile, per tile


class Operands(NamedTuple):
    """Values that both passes prepare: tiles, padded rows and keys, and gate sums."""

    tiles: xla_tiles.CausalTiles
    rows: int  # rows per tile: positions times query heads per key-value head
    q_BGMK: Array
    k_BGSK: Array
    v_BGSV: Array
    dtype: jnp.dtype  # accumulation dtype
    gates: GateSums | None
    segments_B1S: Array | None  # padded with the last document

    def rows_of(self, x_BTHV: Array) -> Array:
        """Return an array in the queries' layout as padded rows."""
        x_BGMV = xla_tiles.to_rows(x_BTHV, self.k_BGSK.shape[1])
        return xla_tiles.pad_to(x_BGMV, self.q_BGMK.shape[2], axis=2)


def _operands(
    q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, log_f_BTH: Array | None, segments_BT: Array | None, window: int
) -> Operands:
    n_batch, seq_len, n_heads, _ = q_BTHK.shape
    n_kv = k_BTGK.shape[2]
    tiles = xla_tiles.causal_tiles(seq_len, min(seq_len, UNIT), n_batch * n_heads, window=window)
    rows = tiles.side * (n_heads // n_kv)
    q_BGMK = xla_tiles.pad_to(xla_tiles.to_rows(q_BTHK, n_kv), tiles.padded * (n_heads // n_kv), axis=2)
    k_BGSK, v_BGSV = (xla_tiles.pad_to(x.transpose(0, 2, 1, 3), tiles.padded, axis=2) for x in (k_BTGK, v_BTGV))
    acc = accumulation_dtype(q_BTHK, k_BTGK, v_BTGV)
    segments_BS = None
    if segments_BT is not None:
        segments_BS = jnp.pad(segments_BT, ((0, 0), (0, tiles.padded - seq_len)), mode="edge")
    gates = None if log_f_BTH is None else _gate_sums(log_f_BTH.astype(acc), segments_BS, tiles, n_kv)
    segments_B1S = None if segments_BS is None else segments_BS[:, None]
    return Operands(tiles, rows, q_BGMK, k_BGSK, v_BGSV, acc, gates, segments_B1S)


def _gate_sums(log_f_BTH: Array, segments_BS: Array | None, tiles: xla_tiles.CausalTiles, n_kv: int) -> GateSums:
    n_batch, _, n_heads = log_f_BTH.shape
    # Padded positions do not forget.
    log_f_BSH = xla_tiles.pad_to(log_f_BTH, tiles.padded, axis=1)
    log_f_BnsH = log_f_BSH.reshape(n_batch, -1, tiles.side, n_heads)
    if segments_BS is None:
        until_BnsH = jnp.cumsum(log_f_BnsH, axis=2)
    else:
        first_Bns1 = first_tokens(segments_BS).reshape(n_batch, -1, tiles.side, 1)
        until_BnsH = documents.restarting_sum(log_f_BnsH, first_Bns1, axis=2)
    next_BnsH = jnp.pad(log_f_BnsH[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
    after_BnsH = jax.lax.cumsum(next_BnsH, axis=2, reverse=True)
    until_BGM, after_BGM = (
        xla_tiles.scalar_to_rows(x.reshape(log_f_BSH.shape), n_kv) for x in (until_BnsH, after_BnsH)
    )
    whole_BGRn = jnp.moveaxis(until_BnsH[:, :, -1], 1, 2).reshape(n_batch, n_kv, n_heads // n_kv, -1)
    return GateSums(until_BGM, after_BGM, whole_BGRn)


def _tile_scores(operands: Operands, row: Array, col: Array, options: Options) -> tuple[Array, Array]:
    """Return a tile's scores [B, G, rows, side] and visibility [rows, side], with segments [B, 1, rows, side].

    Visibility is True where the query sees the key.
    """
    tiles, rows = operands.tiles, operands.rows
    n_shared = rows // tiles.side
    q_BGmK = xla_tiles.block(operands.q_BGMK, row, rows)
    k_BGsK = xla_tiles.block(operands.k_BGSK, col, tiles.side)
    s_BGms = options.scale * _dot("bgmk,bgsk->bgms", q_BGmK, k_BGsK, operands.dtype)
    row_m = jnp.arange(rows)
    distance_ms = (row - col) * tiles.side + (row_m // n_shared)[:, None] - jnp.arange(tiles.side)
    if options.slopes:
        slope_GR = jnp.asarray(options.slopes, operands.dtype).reshape(-1, n_shared)
        s_BGms -= jnp.tile(slope_GR, (1, tiles.side))[..., None] * distance_ms
    if operands.gates is not None:
        s_BGms += _tile_decays(operands.gates, row, col, rows, n_shared)
    visible_ms = distance_ms >= 0
    if options.window:
        visible_ms &= distance_ms < options.window
    if operands.segments_B1S is not None:
        row_B1s, col_B1s = (xla_tiles.block(operands.segments_B1S, at, tiles.side) for at in (row, col))
        visible_ms = visible_ms & (jnp.repeat(row_B1s, n_shared, axis=2)[..., None] == col_B1s[:, :, None])
    return s_BGms, visible_ms


def _tile_decays(gates: GateSums, row: Array, col: Array, rows: int, n_shared: int) -> Array:
    """Return the log-gate sums from each key of a tile to each query.

    The shape is [B, G, rows, side]. A sum covers the positions after the key, up to and including the query.
    """
    key_BGm = jnp.where(
        row == col, -xla_tiles.block(gates.until_BGM, col, rows), xla_tiles.block(gates.after_BGM, col, rows)
    )
    tile_n = jnp.arange(gates.whole_BGRn.shape[-1])
    between_BGR = jnp.where((col < tile_n) & (tile_n < row), gates.whole_BGRn, 0).sum(-1)
    # Row m belongs to query head m % R; its keys need the gate sums of the same head.
    key_BGRs = jnp.swapaxes(key_BGm.reshape(*key_BGm.shape[:2], -1, n_shared), 2, 3) + between_BGR[..., None]
    return xla_tiles.block(gates.until_BGM, row, rows)[..., None] + jnp.tile(key_BGRs, (1, 1, rows // n_shared, 1))


def _scan_forward(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    log_f_BTH: Array | None,
    segments_BT: Array | None,
    options: Options,
) -> tuple[Array, Array]:
    """Return o_BTHV and the log-sum-exp of each padded row, float32 [B, G, M]."""
    operands = _operands(q_BTHK, k_BTGK, v_BTGV, log_f_BTH, segments_BT, options.window)
    tiles, rows, acc = operands.tiles, operands.rows, operands.dtype

    def visit(carry, tile):
        row, col = tile
        m_BGm, l_BGm, o_BGmV = (xla_tiles.block(x, row, rows) for x in carry)
        s_BGms, visible_ms = _tile_scores(operands, row, col, options)
        new_m_BGm = jnp.maximum(m_BGm, jnp.where(visible_ms, s_BGms, MASKED).max(-1))
        # A row may see no key of a tile, with a window or segments. Its maximum is then MASKED, and its exponentials
        # must not count.
        p_BGms = jnp.where(visible_ms, jnp.exp(s_BGms - new_m_BGm[..., None]), 0)
        decay_BGm = jnp.exp(m_BGm - new_m_BGm)
        v_BGsV = xla_tiles.block(operands.v_BGSV, col, tiles.side)
        l_BGm = decay_BGm * l_BGm + p_BGms.sum(-1)
        o_BGmV = decay_BGm[..., None] * o_BGmV + _dot("bgms,bgsv->bgmv", p_BGms.astype(v_BGsV.dtype), v_BGsV, acc)
        new = zip(carry, (new_m_BGm, l_BGm, o_BGmV), strict=True)
        return tuple(xla_tiles.set_block(x, y, row, rows) for x, y in new), None

    zero_BGM = jnp.zeros_like(operands.q_BGMK[..., 0], dtype=acc)
    init = (zero_BGM + MASKED, zero_BGM, zero_BGM[..., None] * jnp.zeros(operands.v_BGSV.shape[-1], acc))
    (m_BGM, l_BGM, o_BGMV), _ = jax.lax.scan(visit, init, (tiles.rows, tiles.cols))
    n_rows = q_BTHK.shape[1] * (rows // tiles.side)
    o_BTHV = xla_tiles.from_rows((o_BGMV / l_BGM[..., None])[:, :, :n_rows].astype(v_BTGV.dtype), q_BTHK.shape[2])
    return o_BTHV, m_BGM + jnp.log(l_BGM)


def _backward(options: Options, saved: tuple, do_BTHV: Array) -> tuple[Array, Array, Array, Array | None, None]:
    q_BTHK, k_BTGK, v_BTGV, log_f_BTH, segments_BT, o_BTHV, lse_BGM = saved
    operands = _operands(q_BTHK, k_BTGK, v_BTGV, log_f_BTH, segments_BT, options.window)
    tiles, rows, acc = operands.tiles, operands.rows, operands.dtype
    seq_len, n_heads = q_BTHK.shape[1:3]
    # Padded rows have do = 0 and D = 0, so they add nothing for any probabilities.
    do_BGMV = operands.rows_of(do_BTHV)
    D_BGM = operands.rows_of(jnp.sum(do_BTHV.astype(acc) * o_BTHV.astype(acc), axis=-1, keepdims=True))[..., 0]

    def visit(carry, tile):
        row, col = tile
        dq_BGMK, dk_BGSK, dv_BGSV, dg_BGM = carry
        q_BGmK, do_BGmV, lse_BGm, D_BGm = (
            xla_tiles.block(x, row, rows) for x in (operands.q_BGMK, do_BGMV, lse_BGM, D_BGM)
        )
        k_BGsK, v_BGsV = (xla_tiles.block(x, col, tiles.side) for x in (operands.k_BGSK, operands.v_BGSV))
        s_BGms, visible_ms = _tile_scores(operands, row, col, options)
        p_BGms = jnp.where(visible_ms, jnp.exp(s_BGms - lse_BGm[..., None]), 0)
        dp_BGms = _dot("bgmv,bgsv->bgms", do_BGmV, v_BGsV, acc)
        if dg_BGM is not None:
            dg_BGM = _add_gate_sums(dg_BGM, p_BGms * (dp_BGms - D_BGm[..., None]), row, col)
        ds_BGms = (options.scale * p_BGms * (dp_BGms - D_BGm[..., None])).astype(k_BGsK.dtype)
        dv_BGsV = _dot("bgms,bgmv->bgsv", p_BGms.astype(do_BGmV.dtype), do_BGmV, acc)
        dq_BGMK = xla_tiles.add_block(dq_BGMK, _dot("bgms,bgsk->bgmk", ds_BGms, k_BGsK, acc), row, rows)
        dk_BGSK = xla_tiles.add_block(dk_BGSK, _dot("bgms,bgmk->bgsk", ds_BGms, q_BGmK, acc), col, tiles.side)
        return (dq_BGMK, dk_BGSK, xla_tiles.add_block(dv_BGSV, dv_BGsV, col, tiles.side), dg_BGM), None

    zeros = [jnp.zeros_like(x, dtype=acc) for x in (operands.q_BGMK, operands.k_BGSK, operands.v_BGSV)]
    init = (*zeros, None if operands.gates is None else jnp.zeros_like(operands.gates.until_BGM))
    (dq_BGMK, dk_BGSK, dv_BGSV, dg_BGM), _ = jax.lax.scan(visit, init, (tiles.rows, tiles.cols))
    dq_BTHK = xla_tiles.from_rows(dq_BGMK[:, :, : seq_len * (rows // tiles.side)], n_heads)
    dk_BTGK, dv_BTGV = (x[:, :, :seq_len].transpose(0, 2, 1, 3) for x in (dk_BGSK, dv_BGSV))
    dlog_f_BTH = None
    if log_f_BTH is not None and dg_BGM is not None:
        dg_BTH = xla_tiles.scalar_from_rows(dg_BGM[:, :, : seq_len * (rows // tiles.side)], n_heads)
        if segments_BT is None:
            dlog_f_BTH = jax.lax.cumsum(dg_BTH, axis=1, reverse=True)
        else:
            ends_BT1 = documents.last_tokens(segments_BT)[..., None]
            dlog_f_BTH = documents.restarting_sum(dg_BTH, ends_BT1, axis=1, reverse=True)
        dlog_f_BTH = dlog_f_BTH.astype(log_f_BTH.dtype)
    dq_BTHK, dk_BTGK, dv_BTGV = dq_BTHK.astype(q_BTHK.dtype), dk_BTGK.astype(k_BTGK.dtype), dv_BTGV.astype(v_BTGV.dtype)
    return dq_BTHK, dk_BTGK, dv_BTGV, dlog_f_BTH, None


def _add_gate_sums(dg_BGM: Array, ds_BGms: Array, row: Array, col: Array) -> Array:
    """Add a tile's row sums of ds, and subtract its column sums."""
    n_rows, side = ds_BGms.shape[2:]
    of_key_BGRs = ds_BGms.reshape(*ds_BGms.shape[:2], side, -1, side).sum(2)
    of_key_BGm = jnp.swapaxes(of_key_BGRs, 2, 3).reshape(*ds_BGms.shape[:3])
    dg_BGM = xla_tiles.add_block(dg_BGM, ds_BGms.sum(-1), row, n_rows)
    return xla_tiles.add_block(dg_BGM, -of_key_BGm, col, n_rows)


_attention.defvjp(_forward, _backward)


def _dot(spec: str, a: Array, b: Array, acc: jnp.dtype) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=acc)
