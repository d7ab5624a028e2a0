"""Triton kernels of attention to selected chunks, forward.

A remote pass attends to the selected chunks; a local pass then adds the local chunk. The kernels `documents_*` do the
same for packed documents: a query reads keys from `start` on, its document's first token, and may have no chunk.

    x = scale log2(e) q . k,  p = 2^(x - lse),  o = p v,  lse in base 2 (the local kernel returns it in base e)

    kernel         one program per                                     writes
    remote_kernel  block of BLOCK_M rows that selected the same chunk  remote o, lse: normalised, per row and head
    local_kernel   tile of BLOCK_M queries in the same chunk           o, lse: per query

    operand      shape            dtype
    q            [B, T, H, K]     bf16, fp16 or fp32
    k            [B, T, G, K]     as q
    v            [B, T, G, V]     as q
    sel          [B, N, S]        int32, the selected chunk, or -1
    order        [B, S, N]        int32, the sorted rows (sort_plan.py)
    first        [B, S, NC + 1]   int32, place of each chunk's first row in order
    ends         [B, S, NC]       int32, number of blocks up to each chunk's last
    start        [B, T]           int32, the first token of each query's document
    remote o     [B, N, H, V]     fp32 with one chunk per query, else v's dtype
    remote lse   [B, N, H]        fp32, base 2
    o            [B, T, H, V]     v's dtype
    lse          [B, T, H]        fp32, base e

N = T TOP_K rows: row t TOP_K + j is the j-th selection of query t, possibly none (-1). EACH consecutive heads of a
key-value head share a selection: S = H / EACH.

The rows of a block share a chunk, so the remote pass gathers queries and reads keys once per block. Each row belongs to
one block, so no atomics are needed. The local pass starts its running softmax from the row results: one softmax covers
all keys. Source: arXiv 2505.18522, Top-1 Chunk.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.sort_plan_kernels import block_of
from kernels_pallas.triton.tile_io import LN2, load_rows, store_rows


@triton.jit
def _attend(
    q_MK, k_ptr, v_ptr, begin, stop, row_M, start_M, m_M, l_M, o_MV,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BLOCK_N: tl.constexpr,
    LOG2_SCALE: tl.constexpr, BOUNDED: tl.constexpr, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the running softmax after a tile of keys from `begin` on.

    When BOUNDED, keys from `stop` on are masked. With DOCUMENTS, keys before start_M are masked, and m_M is finite.
    """
    col_N = begin + tl.arange(0, BLOCK_N)
    k_NK = load_rows(k_ptr, col_N, G * K, stop, K, KP, BOUNDED)
    v_NV = load_rows(v_ptr, col_N, G * V, stop, V, VP, BOUNDED)
    x_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * LOG2_SCALE
    if CAUSAL:
        x_MN = tl.where(col_N[None, :] <= row_M[:, None], x_MN, float("-inf"))
    if BOUNDED:
        x_MN = tl.where((col_N < stop)[None, :], x_MN, float("-inf"))
    if DOCUMENTS:
        x_MN = tl.where(col_N[None, :] >= start_M[:, None], x_MN, float("-inf"))
    # without documents, in the first tile every row has an unmasked key, so the maximum is finite from then on
    new_M = tl.maximum(m_M, tl.max(x_MN, 1))
    p_MN = tl.exp2(x_MN - new_M[:, None])
    decay_M = tl.exp2(m_M - new_M)
    l_M = l_M * decay_M + tl.sum(p_MN, 1)
    o_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, o_MV * decay_M[:, None], input_precision=PRECISION)
    return new_M, l_M, o_MV


@triton.jit
def at_stride(row_M, SIZE: tl.constexpr):
    """Return rows as int64 if an entry has SIZE >= 2^31 numbers.

    Several rows per query can exceed 32-bit offsets.
    """
    return row_M.to(tl.int64) if SIZE >= 2147483648 else row_M


@triton.jit
def starts(start_ptr, query_M, T: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Return the first token of each query's document, 0 from T on; without DOCUMENTS any integers, not used."""
    return tl.load(start_ptr + query_M, mask=query_M < T, other=0) if DOCUMENTS else query_M


@triton.jit
def _remote(
    q_ptr, k_ptr, v_ptr, order_ptr, first_ptr, ends_ptr, start_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = T * TOP_K
    S: tl.constexpr = H // EACH
    pid = tl.program_id(0)
    bs = pid // BLOCKS
    b, s = (bs // S).to(tl.int64), bs % S
    g = s // (S // G)
    chunk, nth = block_of(ends_ptr + bs * NC, pid % BLOCKS, NC, NCP)
    if chunk < NC:
        place_M = tl.load(first_ptr + bs * (NC + 1) + chunk) + nth * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row_M = place_M < tl.load(first_ptr + bs * (NC + 1) + chunk + 1)
        row_M = tl.load(order_ptr + bs.to(tl.int64) * N + place_M, mask=is_row_M, other=N)
        start_M = row_M
        if DOCUMENTS:  # all rows are in the document of the chunk's last token
            start_M = tl.full([BLOCK_M], tl.load(start_ptr + b * T + chunk * C + C - 1), tl.int32)
        k_ptr += b * T * G * K + g * K
        v_ptr += b * T * G * V + g * V
        for i in tl.range(0, EACH):
            h = s * EACH + i
            q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M // TOP_K, H * K, T, K, KP, True)
            m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
            if DOCUMENTS:
                m_M = tl.full([BLOCK_M], -1e30, tl.float32)
            l_M = tl.zeros([BLOCK_M], tl.float32)
            o_MV = tl.zeros([BLOCK_M, VP], tl.float32)
            for piece in tl.static_range(0, C, BLOCK_N):
                m_M, l_M, o_MV = _attend(
                    q_MK, k_ptr, v_ptr, chunk * C + piece, chunk * C + C, row_M, start_M, m_M, l_M, o_MV,
                    G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, piece + BLOCK_N > C, False, DOCUMENTS, PRECISION,
                )  # fmt: skip
            store_rows(o_ptr + b * N * H * V + h * V, at_stride(row_M, N * H * V), H * V, N, o_MV / l_M[:, None], V, VP)
            tl.store(lse_ptr + (b * N + row_M) * H + h, m_M + tl.log2(l_M), mask=row_M < N)


@triton.jit
def remote_kernel(
    q_ptr, k_ptr, v_ptr, order_ptr, first_ptr, ends_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o [B, N, H, V] and lse [B, N, H] of rows that selected a chunk.

    Other rows are not written.
    """
    _remote(
        q_ptr, k_ptr, v_ptr, order_ptr, first_ptr, ends_ptr, order_ptr, o_ptr, lse_ptr,
        T, H, G, K, V, KP, VP, C, TOP_K, EACH, NC, NCP, BLOCKS, BLOCK_M, BLOCK_N, LOG2_SCALE, False, PRECISION,
    )  # fmt: skip


@triton.jit
def documents_remote_kernel(
    q_ptr, k_ptr, v_ptr, order_ptr, first_ptr, ends_ptr, start_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o and lse as `remote_kernel`, for packed documents."""
    _remote(
        q_ptr, k_ptr, v_ptr, order_ptr, first_ptr, ends_ptr, start_ptr, o_ptr, lse_ptr,
        T, H, G, K, V, KP, VP, C, TOP_K, EACH, NC, NCP, BLOCKS, BLOCK_M, BLOCK_N, LOG2_SCALE, True, PRECISION,
    )  # fmt: skip


@triton.jit
def row_of(sel_ptr, query_M, j, T: tl.constexpr, S: tl.constexpr, TOP_K: tl.constexpr):
    """Return the j-th row of each query, or T TOP_K if it has no chunk.

    sel [T TOP_K, S] points to one of S selections.
    """
    row_M = query_M * TOP_K + j
    sel_M = tl.load(sel_ptr + row_M * S, mask=query_M < T, other=-1)
    return tl.where(sel_M >= 0, row_M, T * TOP_K)


@triton.jit
def _local(
    q_ptr, k_ptr, v_ptr, sel_ptr, remote_o_ptr, remote_lse_ptr, start_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr, ALL_SELECT: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = T * TOP_K
    S: tl.constexpr = H // EACH
    tiles_each: tl.constexpr = (C + BLOCK_M - 1) // BLOCK_M
    n_tiles: tl.constexpr = (T + C - 1) // C * tiles_each
    pid = tl.program_id(0)
    b, h = (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H
    g = h // (H // G)
    chunk, sub = pid % n_tiles // tiles_each, pid % n_tiles % tiles_each
    stop = tl.minimum(chunk * C + C, T)
    row_M = chunk * C + sub * BLOCK_M + tl.arange(0, BLOCK_M)
    row_M = tl.where(row_M < stop, row_M, T)
    start_M = starts(start_ptr + b * T, row_M, T, DOCUMENTS)
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
            for j in tl.range(0, TOP_K, loop_unroll_factor=AT_ONCE):
                part_M = row_of(sel_ptr + b * N * S + h // EACH, row_M, j, T, S, TOP_K)
                lse_M = tl.load(remote_lse_ptr + (b * N + part_M) * H + h, mask=part_M < N, other=float("-inf"))
                parts_ptr = remote_o_ptr + b * N * H * V + h * V
                part_MV = load_rows(parts_ptr, at_stride(part_M, N * H * V), H * V, N, V, VP, True).to(tl.float32)
                new_M = tl.maximum(m_M, lse_M)
                # both are -inf if no row so far has a chunk
                decay_M = tl.where(new_M > float("-inf"), tl.exp2(m_M - new_M), 1.0)
                weight_M = tl.where(part_M < N, tl.exp2(lse_M - new_M), 0.0)
                o_MV = o_MV * decay_M[:, None] + part_MV * weight_M[:, None]
                l_M = l_M * decay_M + weight_M
                m_M = new_M
    if DOCUMENTS:  # a row may see no key of a tile: from a finite maximum its exponentials are zero
        m_M = tl.maximum(m_M, -1e30)
    for begin in tl.range(chunk * C, tl.minimum(chunk * C + sub * BLOCK_M + BLOCK_M, stop), BLOCK_N):
        m_M, l_M, o_MV = _attend(
            q_MK, k_ptr, v_ptr, begin, stop, row_M, start_M, m_M, l_M, o_MV,
            G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, True, True, DOCUMENTS, PRECISION,
        )  # fmt: skip
    store_rows(o_ptr + b * T * H * V + h * V, row_M, H * V, T, o_MV / l_M[:, None], V, VP)
    tl.store(lse_ptr + (b * T + row_M) * H + h, (m_M + tl.log2(l_M)) * LN2, mask=row_M < T)


@triton.jit
def local_kernel(
    q_ptr, k_ptr, v_ptr, sel_ptr, remote_o_ptr, remote_lse_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr, ALL_SELECT: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o [B, T, H, V] and lse [B, T, H] of both passes.

    When ALL_SELECT, every query after the first chunk has one row with a chunk. Otherwise sel [B, N, S] is read.
    """
    _local(
        q_ptr, k_ptr, v_ptr, sel_ptr, remote_o_ptr, remote_lse_ptr, sel_ptr, o_ptr, lse_ptr,
        T, H, G, K, V, KP, VP, C, TOP_K, EACH, ALL_SELECT, AT_ONCE, BLOCK_M, BLOCK_N, LOG2_SCALE, False, PRECISION,
    )  # fmt: skip


@triton.jit
def documents_local_kernel(
    q_ptr, k_ptr, v_ptr, sel_ptr, remote_o_ptr, remote_lse_ptr, start_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o and lse as `local_kernel`, for packed documents."""
    _local(
        q_ptr, k_ptr, v_ptr, sel_ptr, remote_o_ptr, remote_lse_ptr, start_ptr, o_ptr, lse_ptr,
        T, H, G, K, V, KP, VP, C, TOP_K, EACH, False, AT_ONCE, BLOCK_M, BLOCK_N, LOG2_SCALE, True, PRECISION,
    )  # fmt: skip
