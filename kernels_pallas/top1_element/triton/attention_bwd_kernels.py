"""Triton kernels of Top-1 Element's gradients.

    p = 2^(s LOG2_SCALE - lse),  D = rowsum(do * soft),  ds = p * (do v^T - D)
    dq = scale ds k,  dk = scale ds^T q,  dv: "soft" is p^T do, "hard" sums do over the queries that chose the key

    kernel          one program per                   writes
    dq_kernel       BLOCK_M queries of a query head   dq
    dk_kernel       BLOCK_N keys of a key-value head  dk
    dkv_kernel      BLOCK_N keys of a key-value head  dk, "soft" dv
    hard_dv_kernel  BLOCK_N keys of a key-value head  "hard" dv

    operand        shape         dtype
    q, do, dq      [B, T, H, .]  bf16, fp16 or fp32
    k, v, dk, dv   [B, T, G, .]  as q
    lse            [B, H, T]     fp32, base 2
    D              [B, H, T]     fp32
    sorted, order  [B, G, T R]   int32: best keys in ascending order, and the row t R + r of each

p is recomputed per tile. dq has one pass over query tiles, dk and dv have one over key tiles, and both recompute the
scores. This takes seven matrix products instead of five, but needs no atomics, so two runs give the same bits. Rows
past the end have do = D = 0 and add nothing. "hard" dv needs no scores. Only tiles on the diagonal are masked, so
BLOCK_N must divide BLOCK_M in dq_kernel, and BLOCK_M must divide BLOCK_N in dk_kernel and dkv_kernel. `soft` is the
softmax output p v. Source: arXiv 2505.18522, Top-1 Element.
"""

import triton
import triton.language as tl

from kernels_pallas.top1_element.triton.attention_kernels import place
from kernels_pallas.triton.tile_io import load_rows, store_rows


@triton.jit
def _dq_over_keys(
    q_MK, do_MV, lse_M, D_M, dq_MK, k_ptr, v_ptr, row_M, begin, end,
    T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, end, BLOCK_N):
        col_N = tl.multiple_of(start, BLOCK_N) + tl.arange(0, BLOCK_N)
        k_NK = load_rows(k_ptr, col_N, G * K, T, K, KP, DIAGONAL)
        v_NV = load_rows(v_ptr, col_N, G * V, T, V, VP, DIAGONAL)
        s_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION)
        p_MN = tl.exp2(s_MN * LOG2_SCALE - lse_M[:, None])
        if DIAGONAL:
            p_MN = tl.where(col_N[None, :] <= row_M[:, None], p_MN, 0.0)
        dp_MN = tl.dot(do_MV, tl.trans(v_NV), input_precision=PRECISION)
        ds_MN = (p_MN * (dp_MN - D_M[:, None])).to(k_NK.dtype)
        dq_MK = tl.dot(ds_MN, k_NK, dq_MK, input_precision=PRECISION)
    return dq_MK


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, dq_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq [B, T, H, K].

    lse (base 2) and D are [B, H, T].
    """
    tile, b, h = place(T, H, BLOCK_M, True)
    g = h // (H // G)
    k_ptr += b * T * G * K + g * K
    v_ptr += b * T * G * V + g * V
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    do_MV = load_rows(do_ptr + b * T * H * V + h * V, row_M, H * V, T, V, VP, True)
    lse_M = tl.load(lse_ptr + (b * H + h) * T + row_M, mask=row_M < T, other=0.0)
    D_M = tl.load(D_ptr + (b * H + h) * T + row_M, mask=row_M < T, other=0.0)
    dq_MK = tl.zeros([BLOCK_M, KP], tl.float32)
    diagonal = tile * BLOCK_M
    dq_MK = _dq_over_keys(
        q_MK, do_MV, lse_M, D_M, dq_MK, k_ptr, v_ptr, row_M, 0, diagonal,
        T, G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, False, PRECISION,
    )  # fmt: skip
    dq_MK = _dq_over_keys(
        q_MK, do_MV, lse_M, D_M, dq_MK, k_ptr, v_ptr, row_M, diagonal, tl.minimum(diagonal + BLOCK_M, T),
        T, G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, True, PRECISION,
    )  # fmt: skip
    store_rows(dq_ptr + b * T * H * K + h * K, row_M, H * K, T, dq_MK * SCALE, K, KP)


@triton.jit
def _dkv_over_queries(
    k_NK, v_NV, dk_NK, dv_NV, q_ptr, do_ptr, lse_ptr, D_ptr, col_N, begin, end,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BLOCK_M: tl.constexpr, LOG2_SCALE: tl.constexpr, SOFT: tl.constexpr, DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # scores are transposed, [keys, queries]: as left operands p and ds stay in registers
    BOUNDED: tl.constexpr = DIAGONAL or T % BLOCK_M != 0
    for start in tl.range(begin, end, BLOCK_M):
        row_M = tl.multiple_of(start, BLOCK_M) + tl.arange(0, BLOCK_M)
        q_MK = load_rows(q_ptr, row_M, H * K, T, K, KP, BOUNDED)
        do_MV = load_rows(do_ptr, row_M, H * V, T, V, VP, BOUNDED)
        if BOUNDED:
            lse_M = tl.load(lse_ptr + row_M, mask=row_M < T, other=0.0)
            D_M = tl.load(D_ptr + row_M, mask=row_M < T, other=0.0)
        else:
            lse_M = tl.load(lse_ptr + row_M)
            D_M = tl.load(D_ptr + row_M)
        s_NM = tl.dot(k_NK, tl.trans(q_MK), input_precision=PRECISION)
        p_NM = tl.exp2(s_NM * LOG2_SCALE - lse_M[None, :])
        if DIAGONAL:
            p_NM = tl.where(col_N[:, None] <= row_M[None, :], p_NM, 0.0)
        if SOFT:
            dv_NV = tl.dot(p_NM.to(do_MV.dtype), do_MV, dv_NV, input_precision=PRECISION)
        dp_NM = tl.dot(v_NV, tl.trans(do_MV), input_precision=PRECISION)
        ds_NM = (p_NM * (dp_NM - D_M[None, :])).to(q_MK.dtype)
        dk_NK = tl.dot(ds_NM, q_MK, dk_NK, input_precision=PRECISION)
    return dk_NK, dv_NV


@triton.jit
def _key_grads(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, dk_ptr, dv_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    SOFT: tl.constexpr, PRECISION: tl.constexpr,
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
    for r in range(R):  # the query heads that read this key
        h = g * R + r
        q_of = q_ptr + b * T * H * K + h * K
        do_of = do_ptr + b * T * H * V + h * V
        lse_of = lse_ptr + (b * H + h) * T
        D_of = D_ptr + (b * H + h) * T
        dk_NK, dv_NV = _dkv_over_queries(
            k_NK, v_NV, dk_NK, dv_NV, q_of, do_of, lse_of, D_of, col_N, diagonal, ahead,
            T, H, K, V, KP, VP, BLOCK_M, LOG2_SCALE, SOFT, True, PRECISION,
        )  # fmt: skip
        dk_NK, dv_NV = _dkv_over_queries(
            k_NK, v_NV, dk_NK, dv_NV, q_of, do_of, lse_of, D_of, col_N, diagonal + BLOCK_N, T,
            T, H, K, V, KP, VP, BLOCK_M, LOG2_SCALE, SOFT, False, PRECISION,
        )  # fmt: skip
    store_rows(dk_ptr + b * T * G * K + g * K, col_N, G * K, T, dk_NK * SCALE, K, KP)
    if SOFT:
        store_rows(dv_ptr + b * T * G * V + g * V, col_N, G * V, T, dv_NV, V, VP)


@triton.jit
def dk_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, dk_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk [B, T, G, K], summed over the group's query heads.

    lse (base 2) and D are [B, H, T].
    """
    _key_grads(
        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, dk_ptr, dk_ptr,
        T, H, G, K, V, KP, VP, BLOCK_M, BLOCK_N, SCALE, LOG2_SCALE, False, PRECISION,
    )  # fmt: skip


@triton.jit
def dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, dk_ptr, dv_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dk as in `dk_kernel`, and the "soft" dv [B, T, G, V]."""
    _key_grads(
        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, dk_ptr, dv_ptr,
        T, H, G, K, V, KP, VP, BLOCK_M, BLOCK_N, SCALE, LOG2_SCALE, True, PRECISION,
    )  # fmt: skip


@triton.jit
def _first_at_least(sorted_ptr, target, M: tl.constexpr, STEPS: tl.constexpr):
    """Return how many of the M sorted entries are below `target`, by bisection."""
    low = target * 0
    high = low + M
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        is_below = is_open & (tl.load(sorted_ptr + middle, mask=is_open, other=0) < target)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
    return low


@triton.jit
def hard_dv_kernel(
    do_ptr, sorted_ptr, order_ptr, dv_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dv [B, T, G, V], the sum of do over the rows that chose each key.

    sorted, order [B, G, T R] int32 are the best keys in ascending order and the row t R + r of each. A program has
    BLOCK_N keys. It finds their rows by bisection and sums them as products with a 0/1 tile, in a fixed order.
    """
    R: tl.constexpr = H // G
    M: tl.constexpr = T * R
    tile, b, g = place(T, G, BLOCK_N, False)
    col_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    sorted_ptr += (b * G + g) * M
    order_ptr += (b * G + g) * M
    begin = _first_at_least(sorted_ptr, tile * BLOCK_N, M, STEPS)
    end = _first_at_least(sorted_ptr, (tile + 1) * BLOCK_N, M, STEPS)
    do_ptr += b * T * H * V + g * R * V
    dv_NV = tl.zeros([BLOCK_N, VP], tl.float32)
    d = tl.arange(0, VP)
    for start in tl.range(begin, end, BLOCK_R):
        at_R = start + tl.arange(0, BLOCK_R)
        key_R = tl.load(sorted_ptr + at_R, mask=at_R < end, other=-1)
        row_R = tl.load(order_ptr + at_R, mask=at_R < end, other=0)
        offset_R = row_R // R * (H * V) + row_R % R * V
        mask = (at_R < end)[:, None] & (d < V)[None, :]
        do_RV = tl.load(do_ptr + offset_R[:, None] + d[None, :], mask=mask, other=0.0)
        is_mine_NR = (col_N[:, None] == key_R[None, :]).to(do_RV.dtype)
        dv_NV = tl.dot(is_mine_NR, do_RV, dv_NV, input_precision=PRECISION)
    store_rows(dv_ptr + b * T * G * V + g * V, col_N, G * V, T, dv_NV, V, VP)
