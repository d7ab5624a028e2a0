"""Triton kernels of PaTH's walk over earlier chunks.

    kernel     one program per                            writes
    forward    head, chunk, M queries                     o, lse
    queries    head, chunk, M queries                     queries
    dq         head, chunk, M queries                     dq, behind, ds summed over keys
    dkv        head, chunk, N keys                        dk, dv, ds summed over queries, dP if N is the chunk
    dproduct   head, chunk                                dP, in longer chunks

    operand               shape                   dtype    meaning
    q, dq                 [c, B, H, C, K]         fp32     queries at the start of their chunk
    k, dk;  v, do, dv     [c, B, H, C, K or V]    input    keys, values
    product; dproduct     [c, B, H, K, K]         fp16 or fp32 (`walk.product_dtype`); fp32     P
    gates                 [c, B, H, C]            fp32     summed log forget gates (GATES)
    own, o                [c, B, H, C, V]         fp32     own chunk's outputs, merged outputs
    own_lse, lse, D       [c, B, H, C]            fp32     own chunk's logsumexp to base e, total to base 2; do . o
    queries, behind       [pairs, B, H, C, K]     input    q^(n) and g for each (chunk, earlier chunk)

    dq^(n) = sum_j ds_j k_j + g - g P_n^T,   g = dq^(n-1),   dP_n -= q^(n)^T g

CHUNKS is c, and BH is B H. Pairs have the order (1, 0), (2, 0), (2, 1), ... Scores are to base 2. A query cannot be
recovered from the next one, because I - P may be singular. The backward pass therefore walks twice: `queries` stores
q^(n) for each pair, and `dq` goes from the first chunk up and accumulates the gradient of q^(n). It stores g, because
`dproduct`, like `dkv`, sums over the queries of later chunks. Equations and source: `path_walk/api.py`.

Products with P use fp16 for 16-bit inputs. Hopper's matrix units read 16-bit tiles in either order, but TF32 tiles only
with the summed axis contiguous: each P was transposed 4 bytes at a time, which took most of the time. fp16 has as many
mantissa bits as TF32. For its range, a power of two scales each row of queries or gradients. I - P lengthens no query,
so the queries' scale is computed once; it is part of `scale_M`, which multiplies the scores.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import LOG2_E, load_rows, powers_of_two, store_rows


@triton.jit
def _pair(chunk, before):
    return chunk * (chunk - 1) // 2 + before


@triton.jit
def _scores(q_MK, k_NK, scale, gates_M, gates_N, GATES: tl.constexpr, PRECISION: tl.constexpr):
    """Return scores [M, N] to base 2; `scale` and the gates include the factor LOG2_E."""
    s_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION) * scale
    if GATES:
        s_MN += gates_M[:, None] - gates_N[None, :]
    return s_MN


@triton.jit
def _gates(gates_ptr, at_R, GATES: tl.constexpr):
    """Return the sums of log gates [R] at `at_R` to base 2, or without GATES a placeholder."""
    if GATES:
        return tl.load(gates_ptr + at_R) * LOG2_E
    return at_R.to(tl.float32)


@triton.jit
def _product(product_ptr, at, K: tl.constexpr, KP: tl.constexpr):
    """Return P [K, K] of a chunk and head."""
    return load_rows(product_ptr + at * K * K, tl.arange(0, KP), K, K, K, KP, K != KP)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, product_ptr, gates_ptr, own_ptr, own_lse_ptr, o_ptr, lse_ptr,
    BH: tl.constexpr, CHUNKS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, GATES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute o [c, B, H, C, V] and lse [c, B, H, C].

    Programs with the most earlier chunks come first.
    """
    pid = tl.program_id(0)
    tile, head, chunk = pid % (C // M), pid // (C // M) % BH, CHUNKS - 1 - pid // (C // M * BH)
    own = (chunk * BH + head).to(tl.int64)
    row_M = tile * M + tl.arange(0, M)
    q_MK = load_rows(q_ptr + own * C * K, row_M, K, C, K, KP, False)
    scale_M, inverse_M = powers_of_two(q_MK)
    q_MK, scale_M = q_MK * inverse_M[:, None], scale_M * LOG2_E
    gates_M = _gates(gates_ptr + own * C, row_M, GATES)
    m_M = tl.load(own_lse_ptr + own * C + row_M) * LOG2_E
    l_M = tl.full([M], 1.0, tl.float32)
    o_MV = load_rows(own_ptr + own * C * V, row_M, V, C, V, VP, False)
    for step in tl.range(0, chunk):
        at = ((chunk - 1 - step) * BH + head).to(tl.int64)
        for start in tl.static_range(0, C, N):
            col_N = start + tl.arange(0, N)
            k_NK = load_rows(k_ptr + at * C * K, col_N, K, C, K, KP, False)
            v_NV = load_rows(v_ptr + at * C * V, col_N, V, C, V, VP, False)
            gates_N = _gates(gates_ptr + at * C, col_N, GATES)
            s_MN = _scores(q_MK.to(k_NK.dtype), k_NK, scale_M[:, None], gates_M, gates_N, GATES, PRECISION)
            new_M = tl.maximum(m_M, tl.max(s_MN, 1))
            p_MN = tl.exp2(s_MN - new_M[:, None])
            decay_M = tl.exp2(m_M - new_M)
            l_M = l_M * decay_M + tl.sum(p_MN, 1)
            o_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, o_MV * decay_M[:, None], input_precision=PRECISION)
            m_M = new_M
        product_KK = _product(product_ptr, at, K, KP)
        q_MK = tl.dot((-q_MK).to(product_KK.dtype), product_KK, q_MK, input_precision=PRECISION)
    store_rows(o_ptr + own * C * V, row_M, V, C, o_MV / l_M[:, None], V, VP)
    tl.store(lse_ptr + own * C + row_M, m_M + tl.log2(l_M))


@triton.jit
def queries_kernel(
    q_ptr, product_ptr, queries_ptr,
    BH: tl.constexpr, CHUNKS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store q^(n) [pairs, B, H, C, K]."""
    pid = tl.program_id(0)
    tile, head, chunk = pid % (C // M), pid // (C // M) % BH, CHUNKS - 1 - pid // (C // M * BH)
    row_M = tile * M + tl.arange(0, M)
    q_MK = load_rows(q_ptr + (chunk * BH + head).to(tl.int64) * C * K, row_M, K, C, K, KP, False)
    scale_M, inverse_M = powers_of_two(q_MK)
    q_MK *= inverse_M[:, None]
    for step in tl.range(0, chunk):
        before = chunk - 1 - step
        pair = (_pair(chunk, before) * BH + head).to(tl.int64)
        store_rows(queries_ptr + pair * C * K, row_M, K, C, q_MK * scale_M[:, None], K, KP)
        product_KK = _product(product_ptr, (before * BH + head).to(tl.int64), K, KP)
        q_MK = tl.dot((-q_MK).to(product_KK.dtype), product_KK, q_MK, input_precision=PRECISION)


@triton.jit
def dq_kernel(
    queries_ptr, k_ptr, v_ptr, product_ptr, gates_ptr, do_ptr, lse_ptr, D_ptr, dq_ptr, behind_ptr, sum_ptr,
    BH: tl.constexpr, CHUNKS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, GATES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq [c, B, H, C, K], g [pairs, B, H, C, K] and ds summed over the keys."""
    pid = tl.program_id(0)
    tile, head, chunk = pid % (C // M), pid // (C // M) % BH, CHUNKS - 1 - pid // (C // M * BH)
    own = (chunk * BH + head).to(tl.int64)
    row_M = tile * M + tl.arange(0, M)
    do_MV = load_rows(do_ptr + own * C * V, row_M, V, C, V, VP, False)
    gates_M = _gates(gates_ptr + own * C, row_M, GATES)
    lse_M = tl.load(lse_ptr + own * C + row_M)
    D_M = tl.load(D_ptr + own * C + row_M)
    dq_MK = tl.zeros([M, KP], tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    for before in tl.range(0, chunk):
        at = (before * BH + head).to(tl.int64)
        pair = (_pair(chunk, before) * BH + head).to(tl.int64)
        q_MK = load_rows(queries_ptr + pair * C * K, row_M, K, C, K, KP, False)
        store_rows(behind_ptr + pair * C * K, row_M, K, C, dq_MK, K, KP)
        product_KK = _product(product_ptr, at, K, KP)
        scale_M, inverse_M = powers_of_two(dq_MK)
        low_MK = (dq_MK * inverse_M[:, None]).to(product_KK.dtype)
        dq_MK -= tl.dot(low_MK, tl.trans(product_KK), input_precision=PRECISION) * scale_M[:, None]
        for start in tl.static_range(0, C, N):
            col_N = start + tl.arange(0, N)
            k_NK = load_rows(k_ptr + at * C * K, col_N, K, C, K, KP, False)
            v_NV = load_rows(v_ptr + at * C * V, col_N, V, C, V, VP, False)
            gates_N = _gates(gates_ptr + at * C, col_N, GATES)
            p_MN = tl.exp2(_scores(q_MK, k_NK, LOG2_E, gates_M, gates_N, GATES, PRECISION) - lse_M[:, None])
            dp_MN = tl.dot(do_MV, tl.trans(v_NV), input_precision=PRECISION)
            ds_MN = p_MN * (dp_MN - D_M[:, None])
            sum_M += tl.sum(ds_MN, 1)
            dq_MK = tl.dot(ds_MN.to(k_NK.dtype), k_NK, dq_MK, input_precision=PRECISION)
    store_rows(dq_ptr + own * C * K, row_M, K, C, dq_MK, K, KP)
    tl.store(sum_ptr + own * C + row_M, sum_M)


@triton.jit
def dkv_kernel(
    queries_ptr, behind_ptr, k_ptr, v_ptr, gates_ptr, do_ptr, lse_ptr, D_ptr, dk_ptr, dv_ptr, sum_ptr, dproduct_ptr,
    BH: tl.constexpr, CHUNKS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, GATES: tl.constexpr, PRODUCTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv [c, B, H, C, .] and ds summed over the queries [c, B, H, C].

    With PRODUCTS, where a tile has all keys of the chunk, the kernel also computes dP [c, B, H, K, K].
    """
    pid = tl.program_id(0)
    tile, head, before = pid % (C // N), pid // (C // N) % BH, pid // (C // N * BH)
    own = (before * BH + head).to(tl.int64)
    col_N = tile * N + tl.arange(0, N)
    k_NK = load_rows(k_ptr + own * C * K, col_N, K, C, K, KP, False)
    v_NV = load_rows(v_ptr + own * C * V, col_N, V, C, V, VP, False)
    gates_N = _gates(gates_ptr + own * C, col_N, GATES)
    dk_NK = tl.zeros([N, KP], tl.float32)
    dv_NV = tl.zeros([N, VP], tl.float32)
    sum_N = tl.zeros([N], tl.float32)
    dproduct_KK = tl.zeros([KP, KP], tl.float32)
    for chunk in tl.range(before + 1, CHUNKS):
        at = (chunk * BH + head).to(tl.int64)
        pair = (_pair(chunk, before) * BH + head).to(tl.int64)
        for start in tl.static_range(0, C, M):
            row_M = start + tl.arange(0, M)
            q_MK = load_rows(queries_ptr + pair * C * K, row_M, K, C, K, KP, False)
            do_MV = load_rows(do_ptr + at * C * V, row_M, V, C, V, VP, False)
            gates_M = _gates(gates_ptr + at * C, row_M, GATES)
            lse_M = tl.load(lse_ptr + at * C + row_M)
            D_M = tl.load(D_ptr + at * C + row_M)
            s_NM = tl.dot(k_NK, tl.trans(q_MK), input_precision=PRECISION) * LOG2_E
            if GATES:
                s_NM += gates_M[None, :] - gates_N[:, None]
            p_NM = tl.exp2(s_NM - lse_M[None, :])
            dv_NV = tl.dot(p_NM.to(do_MV.dtype), do_MV, dv_NV, input_precision=PRECISION)
            dp_NM = tl.dot(v_NV, tl.trans(do_MV), input_precision=PRECISION)
            ds_NM = p_NM * (dp_NM - D_M[None, :])
            sum_N += tl.sum(ds_NM, 1)
            dk_NK = tl.dot(ds_NM.to(q_MK.dtype), q_MK, dk_NK, input_precision=PRECISION)
            if PRODUCTS:
                g_MK = load_rows(behind_ptr + pair * C * K, row_M, K, C, K, KP, False)
                dproduct_KK = tl.dot(tl.trans(q_MK), g_MK, dproduct_KK, input_precision=PRECISION)
    store_rows(dk_ptr + own * C * K, col_N, K, C, dk_NK, K, KP)
    store_rows(dv_ptr + own * C * V, col_N, V, C, dv_NV, V, VP)
    tl.store(sum_ptr + own * C + col_N, sum_N)
    if PRODUCTS:
        store_rows(dproduct_ptr + own * K * K, tl.arange(0, KP), K, K, -dproduct_KK, K, KP)


@triton.jit
def dproduct_kernel(
    queries_ptr, behind_ptr, dproduct_ptr,
    BH: tl.constexpr, CHUNKS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dP [c, B, H, K, K]."""
    pid = tl.program_id(0)
    head, before = pid % BH, pid // BH
    dproduct_KK = tl.zeros([KP, KP], tl.float32)
    for chunk in tl.range(before + 1, CHUNKS):
        pair = (_pair(chunk, before) * BH + head).to(tl.int64)
        for start in tl.static_range(0, C, M):
            row_M = start + tl.arange(0, M)
            q_MK = load_rows(queries_ptr + pair * C * K, row_M, K, C, K, KP, False)
            g_MK = load_rows(behind_ptr + pair * C * K, row_M, K, C, K, KP, False)
            dproduct_KK = tl.dot(tl.trans(q_MK), g_MK, dproduct_KK, input_precision=PRECISION)
    at = (before * BH + head).to(tl.int64)
    store_rows(dproduct_ptr + at * K * K, tl.arange(0, KP), K, K, -dproduct_KK, K, KP)
