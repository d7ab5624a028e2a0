"""Triton kernels of attention given the selection, forward: a pass over the selected chunks, then the local one.

    remote   a program per block of rows that selected one chunk (sort_plan.py): gathers their queries, attends to the
             chunk, writes the normalised output and its log-sum-exp back to the rows; every row belongs to one block
    local    a program per tile of queries of one chunk: causal attention inside the chunk, starting from what the
             remote pass found for their rows, so all share one softmax

A query has TOP_K rows, one after the other, each with a chunk or none: row t TOP_K + j is the j-th of query t.

x = scale log2(e) q . k, and log-sum-exps are kept to base 2 inside.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.sort_plan_kernels import block_of
from kernels_pallas.triton.tile_io import LN2, load_rows, store_rows


@triton.jit
def _attend(
    q_MK, k_ptr, v_ptr, begin, stop, row_M, m_M, l_M, o_MV,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BLOCK_N: tl.constexpr,
    LOG2_SCALE: tl.constexpr, BOUNDED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys from `begin` on to the running softmax; those from `stop` on are masked when BOUNDED."""
    col_N = begin + tl.arange(0, BLOCK_N)
    k_NK = load_rows(k_ptr, col_N, G * K, stop, K, KP, BOUNDED)
    v_NV = load_rows(v_ptr, col_N, G * V, stop, V, VP, BOUNDED)
    x_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * LOG2_SCALE
    if CAUSAL:
        x_MN = tl.where(col_N[None, :] <= row_M[:, None], x_MN, float("-inf"))
    if BOUNDED:
        x_MN = tl.where((col_N < stop)[None, :], x_MN, float("-inf"))
    # the first tile holds a key that counts for every row, so the maximum is finite from then on
    new_M = tl.maximum(m_M, tl.max(x_MN, 1))
    p_MN = tl.exp2(x_MN - new_M[:, None])
    decay_M = tl.exp2(m_M - new_M)
    l_M = l_M * decay_M + tl.sum(p_MN, 1)
    o_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, o_MV * decay_M[:, None], input_precision=PRECISION)
    return new_M, l_M, o_MV


@triton.jit
def at_stride(row_M, SIZE: tl.constexpr):
    """Rows of an entry of SIZE numbers, in int64 where their offsets are: several for each query may pass 2^31."""
    return row_M.to(tl.int64) if SIZE >= 2147483648 else row_M


@triton.jit
def remote_kernel(
    q_ptr, k_ptr, v_ptr, order_ptr, first_ptr, ends_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """O [B, N, H, V] and lse [B, N, H] fp32 (base 2) of those of the N = T TOP_K rows that have a chunk.

    Others are not written.
    """
    N: tl.constexpr = T * TOP_K
    pid = tl.program_id(0)
    bh = pid // BLOCKS
    b, h = (bh // H).to(tl.int64), bh % H
    g = h // (H // G)
    chunk, nth = block_of(ends_ptr + bh * NC, pid % BLOCKS, NC, NCP)
    if chunk < NC:
        place_M = tl.load(first_ptr + bh * (NC + 1) + chunk) + nth * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row_M = place_M < tl.load(first_ptr + bh * (NC + 1) + chunk + 1)
        row_M = tl.load(order_ptr + bh.to(tl.int64) * N + place_M, mask=is_row_M, other=N)
        q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M // TOP_K, H * K, T, K, KP, True)
        k_ptr += b * T * G * K + g * K
        v_ptr += b * T * G * V + g * V
        m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_M = tl.zeros([BLOCK_M], tl.float32)
        o_MV = tl.zeros([BLOCK_M, VP], tl.float32)
        for piece in tl.static_range(0, C, BLOCK_N):
            m_M, l_M, o_MV = _attend(
                q_MK, k_ptr, v_ptr, chunk * C + piece, chunk * C + C, row_M, m_M, l_M, o_MV,
                G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, piece + BLOCK_N > C, False, PRECISION,
            )  # fmt: skip
        store_rows(o_ptr + b * N * H * V + h * V, at_stride(row_M, N * H * V), H * V, N, o_MV / l_M[:, None], V, VP)
        tl.store(lse_ptr + (b * N + row_M) * H + h, m_M + tl.log2(l_M), mask=row_M < N)


@triton.jit
def row_of(sel_ptr, query_M, j, T: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr):
    """The j-th row of each query, or T TOP_K if that has no chunk, as sel [T TOP_K, H] of a head says."""
    row_M = query_M * TOP_K + j
    sel_M = tl.load(sel_ptr + row_M * H, mask=query_M < T, other=-1)
    return tl.where(sel_M >= 0, row_M, T * TOP_K)


@triton.jit
def local_kernel(
    q_ptr, k_ptr, v_ptr, sel_ptr, remote_o_ptr, remote_lse_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, ALL_SELECT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [B, T, H, V] and lse [B, T, H] (natural) of the local chunk and the results of the remote pass.

    Queries after the first chunk have one row each, with a chunk, when ALL_SELECT; else sel [B, T TOP_K, H] says which.
    """
    N: tl.constexpr = T * TOP_K
    tiles_each: tl.constexpr = (C + BLOCK_M - 1) // BLOCK_M
    n_tiles: tl.constexpr = (T + C - 1) // C * tiles_each
    pid = tl.program_id(0)
    b, h = (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H
    g = h // (H // G)
    chunk, sub = pid % n_tiles // tiles_each, pid % n_tiles % tiles_each
    stop = tl.minimum(chunk * C + C, T)
    row_M = chunk * C + sub * BLOCK_M + tl.arange(0, BLOCK_M)
    row_M = tl.where(row_M < stop, row_M, T)
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    k_ptr += b * T * G * K + g * K
    v_ptr += b * T * G * V + g * V
    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    o_MV = tl.zeros([BLOCK_M, VP], tl.float32)
    if chunk > 0:
        if ALL_SELECT:
            m_M = tl.load(remote_lse_ptr + (b * T + row_M) * H + h, mask=row_M < T, other=0.0).to(tl.float32)
            l_M = tl.full([BLOCK_M], 1.0, tl.float32)
            o_MV = load_rows(remote_o_ptr + b * T * H * V + h * V, row_M, H * V, T, V, VP, True).to(tl.float32)
        else:
            for j in tl.range(0, TOP_K):
                part_M = row_of(sel_ptr + b * N * H + h, row_M, j, T, H, TOP_K)
                lse_M = tl.load(remote_lse_ptr + (b * N + part_M) * H + h, mask=part_M < N, other=float("-inf"))
                parts_ptr = remote_o_ptr + b * N * H * V + h * V
                part_MV = load_rows(parts_ptr, at_stride(part_M, N * H * V), H * V, N, V, VP, True).to(tl.float32)
                new_M = tl.maximum(m_M, lse_M)
                # both are -inf where no row so far has a chunk
                decay_M = tl.where(new_M > float("-inf"), tl.exp2(m_M - new_M), 1.0)
                weight_M = tl.where(part_M < N, tl.exp2(lse_M - new_M), 0.0)
                o_MV = o_MV * decay_M[:, None] + part_MV * weight_M[:, None]
                l_M = l_M * decay_M + weight_M
                m_M = new_M
    for begin in tl.range(chunk * C, tl.minimum(chunk * C + sub * BLOCK_M + BLOCK_M, stop), BLOCK_N):
        m_M, l_M, o_MV = _attend(
            q_MK, k_ptr, v_ptr, begin, stop, row_M, m_M, l_M, o_MV,
            G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, True, True, PRECISION,
        )  # fmt: skip
    store_rows(o_ptr + b * T * H * V + h * V, row_M, H * V, T, o_MV / l_M[:, None], V, VP)
    tl.store(lse_ptr + (b * T + row_M) * H + h, (m_M + tl.log2(l_M)) * LN2, mask=row_M < T)
