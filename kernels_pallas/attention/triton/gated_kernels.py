"""Triton kernels of attention with forget gates, packed documents, or both: forward, dq, and dk with dv.

    s_ij = scale q_i . k_j + c_i - c_j          c: running sum of a query head's log gates; 0 without gates
    p = exp(s - lse),  D = rowsum(do * o),  ds = p (do v^T - D),  dq = scale ds k,  dk = scale ds^T q,  dv = p^T do

    kernel          one program per                   writes
    forward_kernel  BLOCK_M queries of a query head   o, lse
    dq_kernel       BLOCK_M queries of a query head   dq, sum: row sums of ds
    dkv_kernel      BLOCK_N keys of a key-value head  dk, dv, sum: column sums of ds

The kernels `documents_*` do the same for packed documents: query i reads the keys first_i <= j <= i only, which are the
keys of its document, within a window if there is one. first and end never decrease, so the bounds of a tile's first
query or last key bound its loop. GATES says whether they have gates; without gates, whole and rest are placeholders,
and sum is zero.

    operand      shape         dtype
    q, dq        [B, T, H, K]  bf16, fp16 or fp32
    k, dk        [B, T, G, K]  as q
    v, dv        [B, T, G, V]  as q
    o, do        [B, T, H, V]  as q
    whole, rest  [B, H, T]     fp32, the two parts of c (gated.py)
    first, end   [B, T]        int32, a query's first key, and the end of the queries that read a key (documents.py)
    lse          [B, H, T]     fp32, base 2
    D, sum       [B, H, T]     fp32

Precision: differences of whole and rest are exact or nearly exact. A tile takes c relative to its last key. Near keys
and their queries then have small numbers, and a large number means that the query has forgotten the key. Two large
numbers may nearly cancel only for queries in the key's tile.

Scores are in base 2. The loops, the program order and the tile sizes are the same as for Top-1 Element
(top1_element/triton/attention_kernels.py). Its backward kernels explain why dq has a separate pass. Source: arXiv
2503.02130 (gates), 2205.14135 (online softmax).
"""

import triton
import triton.language as tl

from kernels_pallas.top1_element.triton.attention_kernels import place
from kernels_pallas.triton.tile_io import LOG2_E, load_rows, store_rows


@triton.jit
def _sums(whole_ptr, rest_ptr, at_R, T: tl.constexpr, BOUNDED: tl.constexpr):
    """Return both parts of c [R] at positions `at_R`, or any two such arrays.

    When BOUNDED, positions from T on are zeros.
    """
    if BOUNDED:
        return (
            tl.load(whole_ptr + at_R, mask=at_R < T, other=0.0),
            tl.load(rest_ptr + at_R, mask=at_R < T, other=0.0),
        )
    return tl.load(whole_ptr + at_R), tl.load(rest_ptr + at_R)


@triton.jit
def _from(whole_ptr, rest_ptr, last, whole_R, rest_R):
    """Return c [R] minus c at position `last`, in base 2."""
    return ((whole_R - tl.load(whole_ptr + last)) + (rest_R - tl.load(rest_ptr + last))) * LOG2_E


@triton.jit
def _first(first_ptr, row_M, row, T: tl.constexpr, BLOCK_N: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Return the first key of each query, and the begin of the first key tile that the tile's first `row` reads.

    Without DOCUMENTS, every query reads from 0 on, and the first keys are not used.
    """
    if DOCUMENTS:
        first_M = tl.load(first_ptr + row_M, mask=row_M < T, other=0)
        return first_M, tl.load(first_ptr + row) // BLOCK_N * BLOCK_N
    return row_M, 0


@triton.jit
def _visit_keys(
    q_MK, k_ptr, v_ptr, whole_ptr, rest_ptr, whole_M, rest_M, first_M, m_M, l_M, o_MV, row_M, begin, end,
    T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, DIAGONAL: tl.constexpr, GATES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the key tiles in [begin, end).

    All keys are before the queries unless DIAGONAL. With DOCUMENTS, keys before first_M are masked.
    """
    for start in tl.range(begin, end, BLOCK_N):
        col_N = tl.multiple_of(start, BLOCK_N) + tl.arange(0, BLOCK_N)
        k_NK = load_rows(k_ptr, col_N, G * K, T, K, KP, DIAGONAL)
        if GATES:
            whole_N, rest_N = _sums(whole_ptr, rest_ptr, col_N, T, DIAGONAL)
            last = tl.minimum(start + BLOCK_N, T) - 1
            c_M = _from(whole_ptr, rest_ptr, last, whole_M, rest_M)
            c_N = _from(whole_ptr, rest_ptr, last, whole_N, rest_N)
        s_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * LOG2_SCALE
        if GATES:
            s_MN += c_M[:, None] - c_N[None, :]
        if DIAGONAL:
            s_MN = tl.where(col_N[None, :] <= row_M[:, None], s_MN, float("-inf"))
        if DOCUMENTS:
            s_MN = tl.where(col_N[None, :] >= first_M[:, None], s_MN, float("-inf"))
        new_M = tl.maximum(m_M, tl.max(s_MN, 1))
        p_MN = tl.exp2(s_MN - new_M[:, None])
        decay_M = tl.exp2(m_M - new_M)
        v_NV = load_rows(v_ptr, col_N, G * V, T, V, VP, DIAGONAL)
        l_M = l_M * decay_M + tl.sum(p_MN, 1)
        o_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, o_MV * decay_M[:, None], input_precision=PRECISION)
        m_M = new_M
    return m_M, l_M, o_MV


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, whole_ptr, rest_ptr, first_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, GATES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, b, h = place(T, H, BLOCK_M, True)
    g = h // (H // G)
    k_ptr += b * T * G * K + g * K
    v_ptr += b * T * G * V + g * V
    whole_ptr += (b * H + h) * T
    rest_ptr += (b * H + h) * T
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    whole_M, rest_M = row_M, row_M
    if GATES:
        whole_M, rest_M = _sums(whole_ptr, rest_ptr, row_M, T, True)
    first_M, begin = _first(first_ptr + b * T, row_M, tile * BLOCK_M, T, BLOCK_N, DOCUMENTS)
    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if DOCUMENTS:  # a row may see no key of a tile: from a finite maximum its exponentials are zero
        m_M = tl.full([BLOCK_M], -1e30, tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    o_MV = tl.zeros([BLOCK_M, VP], tl.float32)
    diagonal = tile * BLOCK_M
    m_M, l_M, o_MV = _visit_keys(
        q_MK, k_ptr, v_ptr, whole_ptr, rest_ptr, whole_M, rest_M, first_M, m_M, l_M, o_MV, row_M, begin, diagonal,
        T, G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, False, GATES, DOCUMENTS, PRECISION,
    )  # fmt: skip
    m_M, l_M, o_MV = _visit_keys(
        q_MK, k_ptr, v_ptr, whole_ptr, rest_ptr, whole_M, rest_M, first_M, m_M, l_M, o_MV, row_M,
        diagonal, tl.minimum(diagonal + BLOCK_M, T),
        T, G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, True, GATES, DOCUMENTS, PRECISION,
    )  # fmt: skip
    tl.store(lse_ptr + (b * H + h) * T + row_M, m_M + tl.log2(l_M), mask=row_M < T)
    store_rows(o_ptr + b * T * H * V + h * V, row_M, H * V, T, o_MV / l_M[:, None], V, VP)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, whole_ptr, rest_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o [B, T, H, V] and lse [B, H, T] (base 2) for BLOCK_M queries."""
    _forward(
        q_ptr, k_ptr, v_ptr, whole_ptr, rest_ptr, whole_ptr, o_ptr, lse_ptr,
        T, H, G, K, V, KP, VP, BLOCK_M, BLOCK_N, LOG2_SCALE, True, False, PRECISION,
    )  # fmt: skip


@triton.jit
def documents_forward_kernel(
    q_ptr, k_ptr, v_ptr, whole_ptr, rest_ptr, first_ptr, o_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, GATES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o [B, T, H, V] and lse [B, H, T] (base 2) for BLOCK_M queries of packed documents."""
    _forward(
        q_ptr, k_ptr, v_ptr, whole_ptr, rest_ptr, first_ptr, o_ptr, lse_ptr,
        T, H, G, K, V, KP, VP, BLOCK_M, BLOCK_N, LOG2_SCALE, GATES, True, PRECISION,
    )  # fmt: skip


@triton.jit
def _dq_over_keys(
    q_MK, do_MV, lse_M, D_M, dq_MK, sum_M, k_ptr, v_ptr, whole_ptr, rest_ptr, whole_M, rest_M, first_M, row_M,
    begin, end,
    T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, DIAGONAL: tl.constexpr, GATES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, end, BLOCK_N):
        col_N = tl.multiple_of(start, BLOCK_N) + tl.arange(0, BLOCK_N)
        k_NK = load_rows(k_ptr, col_N, G * K, T, K, KP, DIAGONAL)
        v_NV = load_rows(v_ptr, col_N, G * V, T, V, VP, DIAGONAL)
        if GATES:
            whole_N, rest_N = _sums(whole_ptr, rest_ptr, col_N, T, DIAGONAL)
            last = tl.minimum(start + BLOCK_N, T) - 1
            c_M = _from(whole_ptr, rest_ptr, last, whole_M, rest_M) - lse_M
            c_N = _from(whole_ptr, rest_ptr, last, whole_N, rest_N)
        s_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * LOG2_SCALE
        if GATES:
            p_MN = tl.exp2(s_MN + (c_M[:, None] - c_N[None, :]))
        else:
            p_MN = tl.exp2(s_MN - lse_M[:, None])
        if DIAGONAL:
            p_MN = tl.where(col_N[None, :] <= row_M[:, None], p_MN, 0.0)
        if DOCUMENTS:
            p_MN = tl.where(col_N[None, :] >= first_M[:, None], p_MN, 0.0)
        dp_MN = tl.dot(do_MV, tl.trans(v_NV), input_precision=PRECISION)
        ds_MN = p_MN * (dp_MN - D_M[:, None])
        if GATES:
            sum_M += tl.sum(ds_MN, 1)
        dq_MK = tl.dot(ds_MN.to(k_NK.dtype), k_NK, dq_MK, input_precision=PRECISION)
    return dq_MK, sum_M


@triton.jit
def _dq(
    q_ptr, k_ptr, v_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, first_ptr, dq_ptr, sum_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    GATES: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, b, h = place(T, H, BLOCK_M, True)
    g = h // (H // G)
    k_ptr += b * T * G * K + g * K
    v_ptr += b * T * G * V + g * V
    head = (b * H + h) * T
    whole_ptr += head
    rest_ptr += head
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    do_MV = load_rows(do_ptr + b * T * H * V + h * V, row_M, H * V, T, V, VP, True)
    whole_M, rest_M = row_M, row_M
    if GATES:
        whole_M, rest_M = _sums(whole_ptr, rest_ptr, row_M, T, True)
    first_M, begin = _first(first_ptr + b * T, row_M, tile * BLOCK_M, T, BLOCK_N, DOCUMENTS)
    lse_M = tl.load(lse_ptr + head + row_M, mask=row_M < T, other=0.0)
    D_M = tl.load(D_ptr + head + row_M, mask=row_M < T, other=0.0)
    dq_MK = tl.zeros([BLOCK_M, KP], tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    diagonal = tile * BLOCK_M
    dq_MK, sum_M = _dq_over_keys(
        q_MK, do_MV, lse_M, D_M, dq_MK, sum_M, k_ptr, v_ptr, whole_ptr, rest_ptr, whole_M, rest_M, first_M, row_M,
        begin, diagonal,
        T, G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, False, GATES, DOCUMENTS, PRECISION,
    )  # fmt: skip
    dq_MK, sum_M = _dq_over_keys(
        q_MK, do_MV, lse_M, D_M, dq_MK, sum_M, k_ptr, v_ptr, whole_ptr, rest_ptr, whole_M, rest_M, first_M, row_M,
        diagonal, tl.minimum(diagonal + BLOCK_M, T),
        T, G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, True, GATES, DOCUMENTS, PRECISION,
    )  # fmt: skip
    store_rows(dq_ptr + b * T * H * K + h * K, row_M, H * K, T, dq_MK * SCALE, K, KP)
    tl.store(sum_ptr + head + row_M, sum_M, mask=row_M < T)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, dq_ptr, sum_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq [B, T, H, K] and the row sums of ds [B, H, T] for BLOCK_M queries."""
    _dq(
        q_ptr, k_ptr, v_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, whole_ptr, dq_ptr, sum_ptr,
        T, H, G, K, V, KP, VP, BLOCK_M, BLOCK_N, SCALE, LOG2_SCALE, True, False, PRECISION,
    )  # fmt: skip


@triton.jit
def documents_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, first_ptr, dq_ptr, sum_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    GATES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq [B, T, H, K] and the row sums of ds [B, H, T] for BLOCK_M queries of packed documents."""
    _dq(
        q_ptr, k_ptr, v_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, first_ptr, dq_ptr, sum_ptr,
        T, H, G, K, V, KP, VP, BLOCK_M, BLOCK_N, SCALE, LOG2_SCALE, GATES, True, PRECISION,
    )  # fmt: skip


@triton.jit
def _dkv_over_queries(
    k_NK, v_NV, dk_NK, dv_NV, sum_N, c_N, end_N, q_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, col_N, last,
    begin, end,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BLOCK_M: tl.constexpr, LOG2_SCALE: tl.constexpr, DIAGONAL: tl.constexpr, GATES: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BOUNDED: tl.constexpr = DIAGONAL or T % BLOCK_M != 0
    for start in tl.range(begin, end, BLOCK_M):
        row_M = tl.multiple_of(start, BLOCK_M) + tl.arange(0, BLOCK_M)
        q_MK = load_rows(q_ptr, row_M, H * K, T, K, KP, BOUNDED)
        do_MV = load_rows(do_ptr, row_M, H * V, T, V, VP, BOUNDED)
        if GATES:
            whole_M, rest_M = _sums(whole_ptr, rest_ptr, row_M, T, BOUNDED)
        lse_M, D_M = _sums(lse_ptr, D_ptr, row_M, T, BOUNDED)
        if GATES:
            c_M = _from(whole_ptr, rest_ptr, last, whole_M, rest_M) - lse_M
        s_NM = tl.dot(k_NK, tl.trans(q_MK), input_precision=PRECISION) * LOG2_SCALE
        if GATES:
            p_NM = tl.exp2(s_NM + (c_M[None, :] - c_N[:, None]))
        else:
            p_NM = tl.exp2(s_NM - lse_M[None, :])
        if DOCUMENTS:  # no key's queries reach past the end
            p_NM = tl.where(row_M[None, :] < end_N[:, None], p_NM, 0.0)
            if DIAGONAL:
                p_NM = tl.where(col_N[:, None] <= row_M[None, :], p_NM, 0.0)
        elif BOUNDED:  # rows past the end have no gate sum
            p_NM = tl.where((col_N[:, None] <= row_M[None, :]) & (row_M < T)[None, :], p_NM, 0.0)
        dv_NV = tl.dot(p_NM.to(do_MV.dtype), do_MV, dv_NV, input_precision=PRECISION)
        dp_NM = tl.dot(v_NV, tl.trans(do_MV), input_precision=PRECISION)
        ds_NM = p_NM * (dp_NM - D_M[None, :])
        if GATES:
            sum_N += tl.sum(ds_NM, 1)
        dk_NK = tl.dot(ds_NM.to(q_MK.dtype), q_MK, dk_NK, input_precision=PRECISION)
    return dk_NK, dv_NV, sum_N


@triton.jit
def _dkv(
    q_ptr, k_ptr, v_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, end_ptr, dk_ptr, dv_ptr, sum_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    GATES: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = H // G
    tile, b, g = place(T, G, BLOCK_N, False)
    col_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_NK = load_rows(k_ptr + b * T * G * K + g * K, col_N, G * K, T, K, KP, True)
    v_NV = load_rows(v_ptr + b * T * G * V + g * V, col_N, G * V, T, V, VP, True)
    dk_NK = tl.zeros([BLOCK_N, KP], tl.float32)
    dv_NV = tl.zeros([BLOCK_N, VP], tl.float32)
    diagonal = tile * BLOCK_N
    ahead = tl.minimum(diagonal + BLOCK_N, T)
    end_N, end = col_N, T
    if DOCUMENTS:
        end_N = tl.load(end_ptr + b * T + col_N, mask=col_N < T, other=0)
        end = tl.load(end_ptr + b * T + ahead - 1)
    for r in range(R):  # the query heads that read this key
        h = g * R + r
        head = (b * H + h) * T
        q_of = q_ptr + b * T * H * K + h * K
        do_of = do_ptr + b * T * H * V + h * V
        c_N = end_N
        if GATES:
            whole_N, rest_N = _sums(whole_ptr + head, rest_ptr + head, col_N, T, True)
            c_N = _from(whole_ptr + head, rest_ptr + head, ahead - 1, whole_N, rest_N)
        sum_N = tl.zeros([BLOCK_N], tl.float32)
        dk_NK, dv_NV, sum_N = _dkv_over_queries(
            k_NK, v_NV, dk_NK, dv_NV, sum_N, c_N, end_N, q_of, do_of, whole_ptr + head, rest_ptr + head,
            lse_ptr + head, D_ptr + head, col_N, ahead - 1, diagonal, ahead,
            T, H, K, V, KP, VP, BLOCK_M, LOG2_SCALE, True, GATES, DOCUMENTS, PRECISION,
        )  # fmt: skip
        dk_NK, dv_NV, sum_N = _dkv_over_queries(
            k_NK, v_NV, dk_NK, dv_NV, sum_N, c_N, end_N, q_of, do_of, whole_ptr + head, rest_ptr + head,
            lse_ptr + head, D_ptr + head, col_N, ahead - 1, diagonal + BLOCK_N, end,
            T, H, K, V, KP, VP, BLOCK_M, LOG2_SCALE, False, GATES, DOCUMENTS, PRECISION,
        )  # fmt: skip
        tl.store(sum_ptr + head + col_N, sum_N, mask=col_N < T)
    store_rows(dk_ptr + b * T * G * K + g * K, col_N, G * K, T, dk_NK * SCALE, K, KP)
    store_rows(dv_ptr + b * T * G * V + g * V, col_N, G * V, T, dv_NV, V, VP)


@triton.jit
def dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, dk_ptr, dv_ptr, sum_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk, dv [B, T, G, .] for BLOCK_N keys, and the column sums of ds.

    The column sums [B, H, T] are per query head.
    """
    _dkv(
        q_ptr, k_ptr, v_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, whole_ptr, dk_ptr, dv_ptr, sum_ptr,
        T, H, G, K, V, KP, VP, BLOCK_M, BLOCK_N, SCALE, LOG2_SCALE, True, False, PRECISION,
    )  # fmt: skip


@triton.jit
def documents_dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, end_ptr, dk_ptr, dv_ptr, sum_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    GATES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk, dv and the column sums of ds as `dkv_kernel`, for packed documents."""
    _dkv(
        q_ptr, k_ptr, v_ptr, do_ptr, whole_ptr, rest_ptr, lse_ptr, D_ptr, end_ptr, dk_ptr, dv_ptr, sum_ptr,
        T, H, G, K, V, KP, VP, BLOCK_M, BLOCK_N, SCALE, LOG2_SCALE, GATES, True, PRECISION,
    )  # fmt: skip
