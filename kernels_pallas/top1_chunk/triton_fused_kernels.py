"""Select and attend in one Triton kernel, without a sort: the schedule `fused`, for short sequences.

A program scores its tile of queries against every past chunk, which decides the selection, then visits the chunks again
that some row of the tile selected, rows that did not selecting none of their keys, and ends with the own chunk. That is
quadratic where the sorted schedule is linear, but it is one launch, and nothing but q, k, v and the result travels.
"""

import triton
import triton.language as tl

from kernels_pallas.top1_chunk.triton_attend_kernels import LN2
from kernels_pallas.top1_chunk.triton_select_kernels import best_by_logsumexp, best_by_mean
from kernels_pallas.triton_rows import load_rows, store_rows


@triton.jit
def _attend_where(
    q_MK, k_ptr, v_ptr, begin, stop, row_M, chosen_M, m_M, l_M, o_MV,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BLOCK_N: tl.constexpr,
    LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of keys into the running softmax of the rows that chose it, up to the row itself and before `stop`."""
    col_N = begin + tl.arange(0, BLOCK_N)
    k_NK = load_rows(k_ptr, col_N, G * K, stop, K, KP, True)
    v_NV = load_rows(v_ptr, col_N, G * V, stop, V, VP, True)
    x_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * LOG2_SCALE
    is_seen_MN = chosen_M[:, None] & (col_N[None, :] <= row_M[:, None]) & (col_N < stop)[None, :]
    x_MN = tl.where(is_seen_MN, x_MN, float("-inf"))
    new_M = tl.maximum(m_M, tl.max(x_MN, 1))
    # a row that has seen no key yet has no finite maximum, and nothing to scale
    base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    p_MN = tl.exp2(x_MN - base_M[:, None])
    decay_M = tl.exp2(m_M - base_M)
    l_M = l_M * decay_M + tl.sum(p_MN, 1)
    o_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, o_MV * decay_M[:, None], input_precision=PRECISION)
    return new_M, l_M, o_MV


@triton.jit
def fused_kernel(
    q_ptr, k_ptr, v_ptr, mean_ptr, sel_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sel [B, T, H] int32, o [B, T, H, V], lse [B, T, H] (natural). PARTS of means (approx), or 0: exact.

    Means [B, PARTS, T // C, G, K] as `triton_select_kernels.approx_kernel` takes them.
    """
    n_tiles: tl.constexpr = (T + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    tile = n_tiles - 1 - pid % n_tiles
    b, h = (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H
    g = h // (H // G)
    k_ptr += b * T * G * K + g * K
    v_ptr += b * T * G * V + g * V
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n_M = row_M // C
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, T - 1) // C
    if PARTS == 0:
        sel_M = best_by_logsumexp(q_MK, k_ptr, n_M, last, T, G, K, KP, C, BLOCK_N, LOG2_SCALE, PRECISION)
    else:
        mean_ptr += b * PARTS * (T // C) * G * K + g * K
        sel_M = best_by_mean(q_MK, mean_ptr, n_M, last, G, K, KP, T // C, PARTS, 16, PRECISION)
    sel_M = tl.where(n_M == 0, -1, sel_M)
    tl.store(sel_ptr + (b * T + row_M) * H + h, sel_M, mask=row_M < T)

    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    o_MV = tl.zeros([BLOCK_M, VP], tl.float32)
    for c in tl.range(0, last):
        chosen_M = sel_M == c
        if tl.max(chosen_M.to(tl.int32), 0) > 0:
            for piece in tl.static_range(0, C, BLOCK_N):
                m_M, l_M, o_MV = _attend_where(
                    q_MK, k_ptr, v_ptr, c * C + piece, c * C + C, row_M, chosen_M, m_M, l_M, o_MV,
                    G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, PRECISION,
                )  # fmt: skip
    for c in tl.range(tile * BLOCK_M // C, last + 1):
        for piece in tl.static_range(0, C, BLOCK_N):
            m_M, l_M, o_MV = _attend_where(
                q_MK, k_ptr, v_ptr, c * C + piece, tl.minimum(c * C + C, T), row_M, n_M == c, m_M, l_M, o_MV,
                G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, PRECISION,
            )  # fmt: skip
    store_rows(o_ptr + b * T * H * V + h * V, row_M, H * V, T, o_MV / l_M[:, None], V, VP)
    tl.store(lse_ptr + (b * T + row_M) * H + h, (m_M + tl.log2(l_M)) * LN2, mask=row_M < T)
