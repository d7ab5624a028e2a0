"""Triton kernels of chunk selection for packed documents: exact, best_key and chunk means.

A query compares the past chunks that end in its document, by their keys in this document (select_chunk/documents.py).
A tile of queries begins at the first candidate of its first query.

    kernel                  one program per           writes
    documents_keys_kernel   head and BLOCK_M queries  sel, by log-sum-exp or by largest score
    documents_table_kernel  head and BLOCK_M queries  sel, by product with a mean key

    operand  shape                        dtype
    q        [B, T, H, K]                 bf16, fp16 or fp32
    k        [B, T, G, K]                 as q
    start    [B, T]                       int32, the first token of each token's document
    table    [B, PARTS, 1, T // C, G, K]  k's dtype; the PARTS add up to the fp32 means of readable keys
    sel      [B, T, H, TOP_K]             int32, padded with -1

`exact_kernel` in kernels.py compares masses without a maximum per chunk. Here documents bound the number of chunks, so
the simpler log-sum-exp serves.
"""

import triton
import triton.language as tl

from kernels_pallas.select_chunk.triton.kernels import inserted, new_lists, row_scores, scores, with_chunk
from kernels_pallas.triton.tile_io import load_rows


@triton.jit
def _place(T: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (tile, batch entry as int64, head); programs of a head run together, the longest first."""
    n_tiles: tl.constexpr = (T + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    return n_tiles - 1 - pid % n_tiles, (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H


@triton.jit
def _store(sel_ptr, sels, first_M, n_M, b, h, row_M, T: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr):
    """Write sel [B, T, H, TOP_K], padded with -1; candidates are first_M to n_M - 1."""
    for rank in tl.static_range(TOP_K):
        # scores that are NaN leave the list empty: select a candidate
        sel_M = tl.where(n_M - first_M <= rank, -1, tl.maximum(sels[rank], first_M))
        tl.store(sel_ptr + ((b * T + row_M) * H + h) * TOP_K + rank, sel_M, mask=row_M < T)


@triton.jit
def documents_keys_kernel(
    q_ptr, k_ptr, start_ptr, sel_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write sel by log-sum-exp when EXACT, else by largest score."""
    tile, b, h = _place(T, H, BLOCK_M)
    k_ptr += b * T * G * K + h // (H // G) * K
    start_ptr += b * T
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n_M = row_M // C
    first_M = tl.load(start_ptr + row_M, mask=row_M < T, other=0) // C
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, T - 1) // C
    bests, sels = new_lists(tl.full([BLOCK_M], float("-inf"), tl.float32), 0, TOP_K)
    for c in tl.range(tl.load(start_ptr + tile * BLOCK_M) // C, last):
        readable = tl.load(start_ptr + c * C + C - 1)
        m_M = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a piece may have no readable key
        l_M = tl.zeros([BLOCK_M], tl.float32)
        for piece in tl.static_range(0, C, BLOCK_N):
            s_MN = scores(q_MK, k_ptr, c * C + piece, c * C + C, T, G, K, KP, BLOCK_N, piece + BLOCK_N > C, PRECISION)
            is_readable_N = c * C + piece + tl.arange(0, BLOCK_N) >= readable
            s_MN = tl.where(is_readable_N[None, :], s_MN * LOG2_SCALE, float("-inf"))
            new_M = tl.maximum(m_M, tl.max(s_MN, 1))
            if EXACT:
                l_M = l_M * tl.exp2(m_M - new_M) + tl.sum(tl.exp2(s_MN - new_M[:, None]), 1)
            m_M = new_M
        score_M = m_M + tl.log2(l_M) if EXACT else m_M
        score_M = tl.where(c >= first_M, score_M, float("-inf"))
        bests, sels = with_chunk(bests, sels, score_M, c, n_M, False, TOP_K)
    _store(sel_ptr, sels, first_M, n_M, b, h, row_M, T, H, TOP_K)


@triton.jit
def documents_table_kernel(
    q_ptr, table_ptr, start_ptr, sel_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    N_FULL: tl.constexpr, PARTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write sel by the largest product with a mean key."""
    tile, b, h = _place(T, H, BLOCK_M)
    table_ptr += b * PARTS * N_FULL * G * K + h // (H // G) * K
    start_ptr += b * T
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n_M = row_M // C
    first_M = tl.load(start_ptr + row_M, mask=row_M < T, other=0) // C
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, T - 1) // C
    bests, sels = new_lists(tl.full([BLOCK_M], float("-inf"), tl.float32), 0, TOP_K)
    for start in tl.range(tl.load(start_ptr + tile * BLOCK_M) // C, last, BLOCK_N):
        chunk_N = start + tl.arange(0, BLOCK_N)
        s_MN = row_scores(q_MK, table_ptr, chunk_N, G, K, KP, N_FULL, PARTS, 1, PRECISION)
        is_candidate_MN = (chunk_N[None, :] >= first_M[:, None]) & (chunk_N[None, :] < n_M[:, None])
        s_MN = tl.where(is_candidate_MN, s_MN, float("-inf"))
        for rank in tl.static_range(TOP_K):
            top_M, at_M = tl.max(s_MN, 1, return_indices=True, return_indices_tie_break_left=True)
            bests, sels = inserted(bests, sels, top_M, start + at_M, TOP_K)
            if rank + 1 < TOP_K:
                s_MN = tl.where(chunk_N[None, :] == start + at_M[:, None], float("-inf"), s_MN)
    _store(sel_ptr, sels, first_M, n_M, b, h, row_M, T, H, TOP_K)
