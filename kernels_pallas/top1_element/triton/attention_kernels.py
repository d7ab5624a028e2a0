"""Triton kernels of Top-1 Element, forward: best key, softmax, values.

    s = q . k (unscaled),  m_i = argmax_{j <= i} s_ij,  o_i = v[m_i]
    p = 2^(s LOG2_SCALE - lse) (lse in base 2 here),  LOG2_SCALE = scale log2(e),  soft = p v

    kernel              one program per               writes
    forward_kernel      BLOCK_M queries of a head     tile, lse, soft
    evaluate_kernel     BLOCK_M queries of a head     tile
    best_key_kernel     ROWS queries of a head        index
    take_values_kernel  ROWS rows (position and head)  o

    operand      shape         dtype
    q            [B, T, H, K]  bf16, fp16 or fp32
    k            [B, T, G, K]  as q
    v            [B, T, G, V]  as q
    tile, index  [B, T, H]     int32: the tile of BLOCK_N keys with the best key, and the best key m_i
    lse          [B, T, H]     fp32, base e
    soft, o      [B, T, H, V]  v's dtype

The layer's output is o. Its gradient needs soft and lse (top1_element/api.py). Training runs forward_kernel,
best_key_kernel and take_values_kernel; evaluation runs evaluate_kernel instead of the first. BLOCK_M is a multiple of
BLOCK_N, because tiles before the diagonal are not masked, and best_key_kernel has the BLOCK_N that wrote `tile`.

The search costs one select per row and tile, and no extra instruction per score: the loop keeps only the best tile.
best_key_kernel then scores this tile again and takes the first key with the largest score. Tiles ascend and only a
strictly greater score replaces the best, so ties between tiles go to the first. Equal keys have equal scores in both
kernels, so the earliest of equal keys wins; the kernels may rank keys with nearly equal scores differently. The scale
enters in the exponent, as one multiply-add before the special-function unit. Only tiles on the diagonal need a mask.
Programs with the same head run together, so its keys and values stay in the L2 cache; the longest start first. Source:
arXiv 2505.18522, Top-1 Element.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import LN2, load_rows, store_rows


@triton.jit
def place(T: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, DESCENDING: tl.constexpr):
    """Return (tile, batch entry as int64, head) of this program."""
    n_tiles = (T + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    tile = pid % n_tiles
    if DESCENDING:
        tile = n_tiles - 1 - tile
    return tile, (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H


@triton.jit
def _visit_keys(
    q_MK, k_ptr, v_ptr, m_M, best_M, l_M, o_MV, row_M, begin, end,
    T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, SOFT: tl.constexpr, DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the key tiles in [begin, end).

    All keys are before the queries unless DIAGONAL. Also tracks the tile with the best score.
    """
    for start in tl.range(begin, end, BLOCK_N):
        col_N = tl.multiple_of(start, BLOCK_N) + tl.arange(0, BLOCK_N)
        k_NK = load_rows(k_ptr, col_N, G * K, T, K, KP, DIAGONAL)
        s_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION)
        if DIAGONAL:
            s_MN = tl.where(col_N[None, :] <= row_M[:, None], s_MN, float("-inf"))
        top_M = tl.max(s_MN, 1)
        best_M = tl.where(top_M > m_M, start // BLOCK_N, best_M)
        new_M = tl.maximum(m_M, top_M)
        if SOFT:
            v_NV = load_rows(v_ptr, col_N, G * V, T, V, VP, DIAGONAL)
            p_MN = tl.exp2(s_MN * LOG2_SCALE - (new_M * LOG2_SCALE)[:, None])
            decay_M = tl.exp2((m_M - new_M) * LOG2_SCALE)
            l_M = l_M * decay_M + tl.sum(p_MN, 1)
            o_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, o_MV * decay_M[:, None], input_precision=PRECISION)
        m_M = new_M
    return m_M, best_M, l_M, o_MV


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, tile_ptr, lse_ptr, soft_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, SOFT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, b, h = place(T, H, BLOCK_M, True)
    g = h // (H // G)
    k_ptr += b * T * G * K + g * K
    v_ptr += b * T * G * V + g * V
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    best_M = tl.zeros([BLOCK_M], tl.int32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    o_MV = tl.zeros([BLOCK_M, VP], tl.float32)
    diagonal = tile * BLOCK_M
    m_M, best_M, l_M, o_MV = _visit_keys(
        q_MK, k_ptr, v_ptr, m_M, best_M, l_M, o_MV, row_M, 0, diagonal,
        T, G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, SOFT, False, PRECISION,
    )  # fmt: skip
    m_M, best_M, l_M, o_MV = _visit_keys(
        q_MK, k_ptr, v_ptr, m_M, best_M, l_M, o_MV, row_M, diagonal, tl.minimum(diagonal + BLOCK_M, T),
        T, G, K, V, KP, VP, BLOCK_N, LOG2_SCALE, SOFT, True, PRECISION,
    )  # fmt: skip
    at_M = (b * T + row_M) * H + h
    tl.store(tile_ptr + at_M, best_M, mask=row_M < T)
    if SOFT:
        tl.store(lse_ptr + at_M, (m_M * LOG2_SCALE + tl.log2(l_M)) * LN2, mask=row_M < T)
        store_rows(soft_ptr + b * T * H * V + h * V, row_M, H * V, T, o_MV / l_M[:, None], V, VP)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, tile_ptr, lse_ptr, soft_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write tile [B, T, H], lse [B, T, H] and soft [B, T, H, V].

    The tile of BLOCK_N keys contains the best key.
    """
    _forward(
        q_ptr, k_ptr, v_ptr, tile_ptr, lse_ptr, soft_ptr,
        T, H, G, K, V, KP, VP, BLOCK_M, BLOCK_N, LOG2_SCALE, True, PRECISION,
    )  # fmt: skip


@triton.jit
def evaluate_kernel(
    q_ptr, k_ptr, tile_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write only the tile [B, T, H]: no exponential, no product with v."""
    _forward(
        q_ptr, k_ptr, k_ptr, tile_ptr, tile_ptr, tile_ptr,
        T, H, G, K, K, KP, KP, BLOCK_M, BLOCK_N, 1.0, False, PRECISION,
    )  # fmt: skip


@triton.jit
def best_key_kernel(
    q_ptr, k_ptr, tile_ptr, index_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write index [B, T, H], the best key within each row's tile.

    Keys after the query are masked; ties go to the first key. Neighbouring programs have the same head, so they read
    the same keys.
    """
    n_tiles: tl.constexpr = (T + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    t_R = pid % n_tiles * ROWS + tl.arange(0, ROWS)
    b, h = (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H
    at_R = (b * T + t_R) * H + h
    tile_R = tl.load(tile_ptr + at_R, mask=t_R < T, other=0)
    q_RK = load_rows(q_ptr + b * T * H * K + h * K, t_R, H * K, T, K, KP, True)
    col_RN = tile_R[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    is_past_RN = (col_RN <= t_R[:, None]) & (t_R < T)[:, None]
    d = tl.arange(0, KP)
    k_ptr += b * T * G * K + h // (H // G) * K
    k_RNK = tl.load(
        k_ptr + col_RN[:, :, None] * (G * K) + d[None, None, :],
        mask=is_past_RN[:, :, None] & (d < K)[None, None, :],
        other=0.0,
    )
    s_RN = tl.sum(q_RK.to(tl.float32)[:, None, :] * k_RNK.to(tl.float32), 2)
    s_RN = tl.where(is_past_RN, s_RN, float("-inf"))
    is_best_RN = (s_RN == tl.max(s_RN, 1)[:, None]) & is_past_RN
    index_R = tl.min(tl.where(is_best_RN, col_RN, T - 1), 1)
    tl.store(index_ptr + at_R, index_R, mask=t_R < T)


@triton.jit
def take_values_kernel(
    v_ptr, index_ptr, o_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write o [B, T, H, V] = v[index], bit for bit.

    A program's rows are neighbours in [T, H].
    """
    n_tiles: tl.constexpr = (T * H + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    b = (pid // n_tiles).to(tl.int64)
    row_R = pid % n_tiles * ROWS + tl.arange(0, ROWS)
    index_R = tl.load(index_ptr + b * T * H + row_R, mask=row_R < T * H, other=0)
    v_RV = load_rows(v_ptr + b * T * G * V, index_R * G + row_R % H // (H // G), V, T * G, V, VP, True)
    store_rows(o_ptr + b * T * H * V, row_R, V, T * H, v_RV, V, VP)
