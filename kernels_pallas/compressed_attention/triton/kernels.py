"""Triton kernels of the compressed attention: softmax over block means, the choice of blocks, and gradients.

    x = log2(e) q . kbar / sqrt(K),  p = 2^(x - lse),  o = p vbar              over blocks that end at or before a query
    dv = p^T do,  ds = p (do . vbar - D),  dq = ds kbar / sqrt(K),  dk = ds^T q / sqrt(K),  D = do . o

    kernel          one program per                               writes
    forward_kernel  key head and BLOCK_M queries                  o, lse, sel
    dk_kernel       key head, BLOCK_N blocks and ROWS queries     dk and dv parts, and dq if one tile holds all blocks
    dq_kernel       query head and BLOCK_M queries                dq, if there are several tiles of blocks

    operand       shape                 dtype
    q             [B, T, H, K]          bf16, fp16 or fp32
    k             [B, NC, G, K]         fp32, block means
    v             [B, NC, G, V]         fp32, block means
    o             [B, T, H, V]          q's dtype
    lse           [B, T, H]             fp32, base 2; LOWEST for a query without a block
    sel           [B, T, G, TOP_K]      int32, padded with -1
    do, dq        as o, as q
    D             [B, T, H]             fp32; read only with several tiles
    dk, dv parts  [B, SPLITS, NC, G, *] fp32

All R = H / G heads of a key head share a program, which adds their p in registers: scores never reach memory. A near
tie decides which keys are read, so scores have float32 precision: bf16 queries are multiplied with three bf16 parts of
a mean, whose sum is the mean, and other queries in three TF32 products. There are no atomics: two runs give the same
bits. Source: `compressed_attention/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import load_rows, store_rows

LOWEST = tl.constexpr(-1e30)  # not -inf: a query without a block gets exp2(-inf) = 0, not NaN from -inf - (-inf)


@triton.jit
def _key_parts(
    ptr, col_N, stride: tl.constexpr, NC: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, dtype: tl.constexpr
):
    """Return mean keys as three bf16 parts with this sum for bf16 queries, otherwise three times in fp32."""
    k_NK = load_rows(ptr, col_N, stride, NC, K, KP, True)
    if dtype == tl.bfloat16:
        high_NK = k_NK.to(tl.bfloat16)
        rest_NK = k_NK - high_NK.to(tl.float32)
        middle_NK = rest_NK.to(tl.bfloat16)
        parts = high_NK, middle_NK, (rest_NK - middle_NK.to(tl.float32)).to(tl.bfloat16)
    else:
        parts = k_NK, k_NK, k_NK
    return parts


@triton.jit
def _scores(q_MK, k0_NK, k1_NK, k2_NK, is_seen_MN, LOG2_SCALE: tl.constexpr):
    """Return the scores in base 2; -inf for blocks that are not seen."""
    if q_MK.dtype == tl.bfloat16:
        x_MN = tl.dot(q_MK, tl.trans(k2_NK))
        x_MN = tl.dot(q_MK, tl.trans(k1_NK), x_MN)
        x_MN = tl.dot(q_MK, tl.trans(k0_NK), x_MN)
    else:
        x_MN = tl.dot(q_MK.to(tl.float32), tl.trans(k0_NK), input_precision="tf32x3")
    return tl.where(is_seen_MN, x_MN * LOG2_SCALE, float("-inf"))


@triton.jit
def _is_seen(row_M, col_N, C: tl.constexpr, NC: tl.constexpr):
    """Return whether a block exists and ends at or before a query."""
    return (col_N[None, :] < ((row_M + 1) // C)[:, None]) & (col_N < NC)[None, :]


@triton.jit
def _with_best(
    best_MJ, sel_MJ, sum_MN, row_M, col_N,
    C: tl.constexpr, NC: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, TOP_KP: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Return the lists of the TOP_K best blocks, in order, after a tile of later blocks; EMPTY lists are not read.

    `sum_MN` is p summed over R heads. Ties go to the lower block.
    """
    own_M = row_M // C
    is_always_MN = (col_N == 0)[None, :] | (col_N[None, :] == own_M[:, None] - 1)
    score_MN = tl.where(is_always_MN, 2.0 * R, sum_MN)  # more than any sum
    score_MN = tl.where((col_N[None, :] < own_M[:, None]) & (col_N < NC)[None, :], score_MN, -1.0)
    j_J = tl.arange(0, TOP_KP)
    new_MJ, new_sel_MJ = tl.zeros_like(best_MJ) - 1.0, tl.zeros_like(sel_MJ) - 1
    n_old_M = tl.zeros_like(row_M)  # entries of the old list that are in the new list
    for j in tl.range(0, TOP_K):
        most_M = tl.max(score_MN, 1)
        # NC if all are NaN
        at_M = tl.min(tl.where(score_MN == most_M[:, None], col_N[None, :], NC), 1)
        at_M = tl.where((most_M >= 0.0) & (at_M < NC), at_M, -1)
        if not EMPTY:
            is_next_MJ = j_J[None, :] == n_old_M[:, None]
            old_M = tl.max(tl.where(is_next_MJ, best_MJ, -1.0), 1)
            is_old_M = old_M >= most_M
            at_M = tl.where(is_old_M, tl.max(tl.where(is_next_MJ, sel_MJ, -1), 1), at_M)
            most_M = tl.where(is_old_M, old_M, most_M)
            n_old_M += is_old_M.to(tl.int32)
        score_MN = tl.where(col_N[None, :] == at_M[:, None], -1.0, score_MN)
        new_MJ = tl.where(j_J[None, :] == j, most_M[:, None], new_MJ)
        new_sel_MJ = tl.where(j_J[None, :] == j, at_M[:, None], new_sel_MJ)
    return new_MJ, new_sel_MJ


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sel_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, NC: tl.constexpr, TOP_K: tl.constexpr, TOP_KP: tl.constexpr, RP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o [B, T, H, V], lse [B, T, H] and sel [B, T, G, TOP_K].

    With several tiles of blocks, p is computed again for the choice, after the log-sum-exps. The longest programs start
    first.
    """
    R: tl.constexpr = H // G
    n_tiles: tl.constexpr = (T + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    bg, tile = pid // n_tiles, n_tiles - 1 - pid % n_tiles
    b, g = (bg // G).to(tl.int64), bg % G
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr += b * T * H * K + g * R * K
    o_ptr += b * T * H * V + g * R * V
    lse_ptr += b * T * H + g * R
    k_ptr += b * NC * G * K + g * K
    v_ptr += b * NC * G * V + g * V
    dtype = q_ptr.dtype.element_ty
    best_MJ = tl.full([BLOCK_M, TOP_KP], -1.0, tl.float32)
    sel_MJ = tl.full([BLOCK_M, TOP_KP], -1, tl.int32)
    if NC <= BLOCK_N:
        col_N = tl.arange(0, BLOCK_N)
        is_seen_MN = _is_seen(row_M, col_N, C, NC)
        k0_NK, k1_NK, k2_NK = _key_parts(k_ptr, col_N, G * K, NC, K, KP, dtype)
        v_NV = load_rows(v_ptr, col_N, G * V, NC, V, VP, True).to(dtype)
        sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for r in tl.range(0, R):
            q_MK = load_rows(q_ptr + r * K, row_M, H * K, T, K, KP, True)
            x_MN = _scores(q_MK, k0_NK, k1_NK, k2_NK, is_seen_MN, LOG2_SCALE)
            m_M = tl.maximum(tl.max(x_MN, 1), LOWEST)
            p_MN = tl.exp2(x_MN - m_M[:, None])
            l_M = tl.sum(p_MN, 1)
            l_M = tl.where(l_M == 0.0, 1.0, l_M)
            p_MN = p_MN / l_M[:, None]
            sum_MN += p_MN
            o_MV = tl.dot(p_MN.to(dtype), v_NV, input_precision=PRECISION)
            store_rows(o_ptr + r * V, row_M, H * V, T, o_MV, V, VP)
            tl.store(lse_ptr + row_M * H + r, m_M + tl.log2(l_M), mask=row_M < T)
        best_MJ, sel_MJ = _with_best(best_MJ, sel_MJ, sum_MN, row_M, col_N, C, NC, R, TOP_K, TOP_KP, True)
    else:
        stop = tl.minimum((tile * BLOCK_M + BLOCK_M) // C, NC)
        lse_MR = tl.zeros([BLOCK_M, RP], tl.float32)
        for r in tl.range(0, R):
            q_MK = load_rows(q_ptr + r * K, row_M, H * K, T, K, KP, True)
            m_M = tl.full([BLOCK_M], LOWEST, tl.float32)
            l_M = tl.zeros([BLOCK_M], tl.float32)
            o_MV = tl.zeros([BLOCK_M, VP], tl.float32)
            for begin in tl.range(0, stop, BLOCK_N):
                col_N = begin + tl.arange(0, BLOCK_N)
                k0_NK, k1_NK, k2_NK = _key_parts(k_ptr, col_N, G * K, NC, K, KP, dtype)
                v_NV = load_rows(v_ptr, col_N, G * V, NC, V, VP, True).to(dtype)
                x_MN = _scores(q_MK, k0_NK, k1_NK, k2_NK, _is_seen(row_M, col_N, C, NC), LOG2_SCALE)
                new_M = tl.maximum(m_M, tl.max(x_MN, 1))
                p_MN, decay_M = tl.exp2(x_MN - new_M[:, None]), tl.exp2(m_M - new_M)
                l_M = l_M * decay_M + tl.sum(p_MN, 1)
                o_MV = tl.dot(p_MN.to(dtype), v_NV, o_MV * decay_M[:, None], input_precision=PRECISION)
                m_M = new_M
            l_M = tl.where(l_M == 0.0, 1.0, l_M)
            lse_M = m_M + tl.log2(l_M)
            store_rows(o_ptr + r * V, row_M, H * V, T, o_MV / l_M[:, None], V, VP)
            tl.store(lse_ptr + row_M * H + r, lse_M, mask=row_M < T)
            lse_MR = tl.where((tl.arange(0, RP) == r)[None, :], lse_M[:, None], lse_MR)
        for begin in tl.range(0, stop, BLOCK_N):
            col_N = begin + tl.arange(0, BLOCK_N)
            is_seen_MN = _is_seen(row_M, col_N, C, NC)
            k0_NK, k1_NK, k2_NK = _key_parts(k_ptr, col_N, G * K, NC, K, KP, dtype)
            sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for r in tl.range(0, R):
                q_MK = load_rows(q_ptr + r * K, row_M, H * K, T, K, KP, True)
                lse_M = tl.sum(tl.where((tl.arange(0, RP) == r)[None, :], lse_MR, 0.0), 1)
                x_MN = _scores(q_MK, k0_NK, k1_NK, k2_NK, is_seen_MN, LOG2_SCALE)
                sum_MN += tl.exp2(x_MN - lse_M[:, None])
            best_MJ, sel_MJ = _with_best(best_MJ, sel_MJ, sum_MN, row_M, col_N, C, NC, R, TOP_K, TOP_KP, False)
    store_rows(sel_ptr + (b * T * G + g) * TOP_K, row_M, G * TOP_K, T, sel_MJ, TOP_K, TOP_KP)


@triton.jit
def dk_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, dk_ptr, dv_ptr, dq_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, NC: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the dk and dv parts of ROWS queries; dq [B, T, H, K] if NC <= BLOCK_N.

    Otherwise D is read, and queries before the first block's end are skipped.
    """
    R: tl.constexpr = H // G
    TILES: tl.constexpr = (NC + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    split, tile, bg = pid % SPLITS, pid // SPLITS % TILES, pid // SPLITS // TILES
    b, g = (bg // G).to(tl.int64), bg % G
    col_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    q_ptr += b * T * H * K + g * R * K
    do_ptr += b * T * H * V + g * R * V
    dq_ptr += b * T * H * K + g * R * K
    lse_ptr += b * T * H + g * R
    D_ptr += b * T * H + g * R
    dtype = q_ptr.dtype.element_ty
    k0_NK, k1_NK, k2_NK = _key_parts(k_ptr + b * NC * G * K + g * K, col_N, G * K, NC, K, KP, dtype)
    v_NV = load_rows(v_ptr + b * NC * G * V + g * V, col_N, G * V, NC, V, VP, True).to(dtype)
    dk_NK = tl.zeros([BLOCK_N, KP], tl.float32)
    dv_NV = tl.zeros([BLOCK_N, VP], tl.float32)
    first = split * ROWS
    if TILES > 1:
        first = tl.maximum(first, (tile * BLOCK_N * C + C - 1) // BLOCK_M * BLOCK_M)
    for begin in tl.range(first, tl.minimum(split * ROWS + ROWS, T), BLOCK_M):
        row_M = begin + tl.arange(0, BLOCK_M)
        is_seen_MN = _is_seen(row_M, col_N, C, NC)
        for r in tl.range(0, R):
            q_MK = load_rows(q_ptr + r * K, row_M, H * K, T, K, KP, True)
            do_MV = load_rows(do_ptr + r * V, row_M, H * V, T, V, VP, True)
            lse_M = tl.load(lse_ptr + row_M * H + r, mask=row_M < T, other=0.0)
            x_MN = _scores(q_MK, k0_NK, k1_NK, k2_NK, is_seen_MN, LOG2_SCALE)
            p_MN = tl.where((row_M < T)[:, None], tl.exp2(x_MN - lse_M[:, None]), 0.0)
            dv_NV = tl.dot(tl.trans(p_MN.to(dtype)), do_MV, dv_NV, input_precision=PRECISION)
            dp_MN = tl.dot(do_MV, tl.trans(v_NV), input_precision=PRECISION)
            if TILES > 1:
                D_M = tl.load(D_ptr + row_M * H + r, mask=row_M < T, other=0.0)
            else:
                D_M = tl.sum(p_MN * dp_MN, 1)
            ds_MN = (p_MN * (dp_MN - D_M[:, None])).to(dtype)
            dk_NK = tl.dot(tl.trans(ds_MN), q_MK, dk_NK, input_precision=PRECISION)
            if TILES == 1:
                dq_MK = tl.dot(ds_MN, k0_NK.to(dtype), input_precision=PRECISION)
                store_rows(dq_ptr + r * K, row_M, H * K, T, dq_MK * SCALE, K, KP)
    part = (b * SPLITS + split) * NC * G + g
    store_rows(dk_ptr + part * K, col_N, G * K, NC, dk_NK * SCALE, K, KP)
    store_rows(dv_ptr + part * V, col_N, G * V, NC, dv_NV, V, VP)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, dq_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, NC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq [B, T, H, K]; the longest programs start first."""
    n_tiles: tl.constexpr = (T + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    bh, tile = pid // n_tiles, n_tiles - 1 - pid % n_tiles
    b, h = (bh // H).to(tl.int64), bh % H
    g = h // (H // G)
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dtype = q_ptr.dtype.element_ty
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    do_MV = load_rows(do_ptr + b * T * H * V + h * V, row_M, H * V, T, V, VP, True)
    lse_M = tl.load(lse_ptr + b * T * H + row_M * H + h, mask=row_M < T, other=0.0)
    D_M = tl.load(D_ptr + b * T * H + row_M * H + h, mask=row_M < T, other=0.0)
    k_ptr += b * NC * G * K + g * K
    v_ptr += b * NC * G * V + g * V
    dq_MK = tl.zeros([BLOCK_M, KP], tl.float32)
    for begin in tl.range(0, tl.minimum((tile * BLOCK_M + BLOCK_M) // C, NC), BLOCK_N):
        col_N = begin + tl.arange(0, BLOCK_N)
        k0_NK, k1_NK, k2_NK = _key_parts(k_ptr, col_N, G * K, NC, K, KP, dtype)
        v_NV = load_rows(v_ptr, col_N, G * V, NC, V, VP, True).to(dtype)
        x_MN = _scores(q_MK, k0_NK, k1_NK, k2_NK, _is_seen(row_M, col_N, C, NC), LOG2_SCALE)
        dp_MN = tl.dot(do_MV, tl.trans(v_NV), input_precision=PRECISION)
        ds_MN = (tl.exp2(x_MN - lse_M[:, None]) * (dp_MN - D_M[:, None])).to(dtype)
        dq_MK = tl.dot(ds_MN, k0_NK.to(dtype), dq_MK, input_precision=PRECISION)
    store_rows(dq_ptr + b * T * H * K + h * K, row_M, H * K, T, dq_MK * SCALE, K, KP)
