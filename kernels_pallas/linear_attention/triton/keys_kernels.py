"""Triton kernels for linear attention's gradients dr, dk, da, db, dg and du.

    kernel     one program per batch entry and    writes
    d_scores   chunk and head                     pairs [B, c, H, N, C, C] input dtype, own [B, c, H, 1 or 2, C] fp32
    keys       chunk, head, KEYS key channels     dr, dk, da, db [B, T, H, K], dg [B, c * C, H, K], du [B, c, H, K]
                                                  with TIED the gradient of log w, [B, T, H, K], instead of dg

    pairs   d(r|k) (N = 1), with LOW_RANK also d(a|k) (N = 2), unless TIED also d(r|b) and d(a|b) (N = 4)
    own     the diagonals of d(r|k) and d(r|b), which are not in pairs

Each score gradient contributes to one reader and one writer, and both need the same weights. One program therefore
computes all four gradients of its key channels, and `d_scores` computes the score gradients once for all keys. With
exponentials to base 2, this cut RWKV-7's instructions by 67% and the time of `keys` from 1.18 to 0.65 ms per layer on
one H200 (lab/log/kernels.md). TIED means that b is k, as in KDA: the caller passes V + U as v, and b and z are not
read; otherwise z is U. g has base 2, dg is the gradient of the sums to base e. Other operands and flags: kernels.py.
Equations: `linear_attention/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.linear_attention import interface
from kernels_pallas.linear_attention.triton.weight_kernels import (
    BOUND,
    from_middle,
    from_start,
    in_same_block,
    load_sums,
)
from kernels_pallas.triton.tile_io import LOG2_E, load_tile, place_of, store_tile

# A larger drop of g is a log decay at FLOOR, whose gradient is 0. The 0.01 covers the rounding of sums down to -5,540.
LOWEST = tl.constexpr(-interface.FLOOR * LOG2_E.value - 0.01)


@triton.jit
def d_scores_kernel(
    do_ptr, dy_ptr, v_ptr, z_ptr, pairs_ptr, own_ptr,
    T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BONUS: tl.constexpr,
    LOW_RANK: tl.constexpr, TIED: tl.constexpr, BEFORE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a chunk's score gradients below the diagonal, and the diagonals.

    Readers before their own decay, such as a with BEFORE, have their rows in the order 1, ..., C - 1, 0, as
    `keys_kernel` expects.
    """
    N: tl.constexpr = (1 + LOW_RANK) * (1 + (LOW_RANK and not TIED))
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i = tl.arange(0, C)
    back_C = (i + C - 1) % C
    do_ptr += b * T * H * V + h * V
    dy_ptr += b * T * H * V + h * V
    v_ptr += b * T * H * V + h * V
    z_ptr += b * T * H * V + h * V
    pairs_ptr += head * (N * C * C)
    own_ptr += head * ((N + 2) // 3 * C)
    at_row = back_C if BONUS else i
    own_C = d_scores(do_ptr, v_ptr, pairs_ptr, at_row, start, T, H, V, C, BLOCK, BOUNDED, PRECISION, STAGES)
    tl.store(own_ptr + i, own_C)
    if LOW_RANK:
        at_row = back_C if BEFORE else i
        d_scores(dy_ptr, v_ptr, pairs_ptr + C * C, at_row, start, T, H, V, C, BLOCK, BOUNDED, PRECISION, STAGES)
    if N == 4:
        own_C = d_scores(do_ptr, z_ptr, pairs_ptr + 2 * C * C, i, start, T, H, V, C, BLOCK, BOUNDED, PRECISION, STAGES)
        tl.store(own_ptr + C + i, own_C)
        d_scores(dy_ptr, z_ptr, pairs_ptr + 3 * C * C, back_C, start, T, H, V, C, BLOCK, BOUNDED, PRECISION, STAGES)


@triton.jit
def d_scores(
    x_ptr, y_ptr, out_ptr, at_row, start,
    T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write x y^T below its diagonal to rows `at_row` and return the diagonal."""
    n_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    PART: tl.constexpr = V % BLOCK != 0
    i = tl.arange(0, C)
    a_CC = tl.zeros([C, C], tl.float32)
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_V = block * BLOCK + tl.arange(0, BLOCK)
        x_CV = load_tile(x_ptr, start + i, at_V, H * V, 1, T, V, BOUNDED, PART)
        y_VC = load_tile(y_ptr, at_V, start + i, 1, H * V, V, T, PART, BOUNDED)
        a_CC = tl.dot(x_CV, y_VC, a_CC, input_precision=PRECISION)
    # Masks as factors stay in registers (719 instructions per warp); conditions are computed again for each product
    # (1,019).
    is_pair_CC, is_own_CC = (i[None, :] < i[:, None]).to(tl.float32), (i[None, :] == i[:, None]).to(tl.float32)
    store_tile(out_ptr, at_row, i, C, 1, C, C, a_CC * is_pair_CC)
    return tl.sum(a_CC * is_own_CC, 1)


@triton.jit
def keys_kernel(
    r_ptr, do_ptr, a_ptr, dy_ptr, k_ptr, v_ptr, b_ptr, z_ptr, u_ptr, g_ptr, states_ptr, d_states_ptr, pairs_ptr,
    own_ptr, dr_ptr, da_ptr, dk_ptr, db_ptr, dg_ptr, du_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BONUS: tl.constexpr, LOW_RANK: tl.constexpr, TIED: tl.constexpr, MILD: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients for KEYS keys of a chunk and head.

    z is U; `states` are those before the chunks, `d_states` the gradients after them. Chunks with sums below -BOUND
    take a separate branch. On a shared path, their loops cost other chunks 1,000 bytes of spills and a third of all
    instructions.
    """
    n_keys: tl.constexpr = (K + KEYS - 1) // KEYS
    N: tl.constexpr = (1 + LOW_RANK) * (1 + (LOW_RANK and not TIED))
    b, h, start, head = place_of(tl.program_id(0) // n_keys, T, H, C)
    at_K = tl.program_id(0) % n_keys * KEYS + tl.arange(0, KEYS)
    in_K, in_V = b * T * H * K + h * K, b * T * H * V + h * V
    in_g = head // H * (C * H * K) + h * K
    r_ptr += in_K
    a_ptr += in_K
    k_ptr += in_K
    b_ptr += in_K
    dr_ptr += in_K
    da_ptr += in_K
    dk_ptr += in_K
    db_ptr += in_K
    do_ptr += in_V
    dy_ptr += in_V
    v_ptr += in_V
    z_ptr += in_V
    u_ptr += (b * H + h) * K
    g_ptr += in_g
    dg_ptr += in_K if TIED else in_g
    du_ptr += head * K
    states_ptr += head * (K * V)
    d_states_ptr += head * (K * V)
    pairs_ptr += head * (N * C * C)
    own_ptr += head * ((N + 2) // 3 * C)
    i = tl.arange(0, C)
    g_CK = load_sums(g_ptr, i[:, None], at_K[None, :], H * K, K, False)
    if (tl.min(tl.min(g_CK, 1), 0) >= -BOUND) | MILD:
        dg_CK = keys_of(
            r_ptr, do_ptr, a_ptr, dy_ptr, k_ptr, v_ptr, b_ptr, z_ptr, u_ptr, g_ptr, states_ptr, d_states_ptr, pairs_ptr,
            own_ptr, dr_ptr, da_ptr, dk_ptr, db_ptr, du_ptr, g_CK, start, at_K, T, H, K, V, KEYS, C, BLOCK,
            BONUS, LOW_RANK, TIED, False, BOUNDED, PRECISION, STAGES,
        )  # fmt: skip
    else:
        dg_CK = keys_of(
            r_ptr, do_ptr, a_ptr, dy_ptr, k_ptr, v_ptr, b_ptr, z_ptr, u_ptr, g_ptr, states_ptr, d_states_ptr, pairs_ptr,
            own_ptr, dr_ptr, da_ptr, dk_ptr, db_ptr, du_ptr, g_CK, start, at_K, T, H, K, V, KEYS, C, BLOCK,
            BONUS, LOW_RANK, TIED, True, BOUNDED, PRECISION, STAGES,
        )  # fmt: skip
    if TIED:
        dlog_w_CK = tl.cumsum(dg_CK, 0, reverse=True)
        if not MILD:  # a log decay below FLOOR has no gradient
            g_CK = load_sums(g_ptr, i[:, None], at_K[None, :], H * K, K, False)
            before_CK = load_sums(g_ptr, i[:, None], at_K[None, :], H * K, K, True)
            dlog_w_CK = tl.where(before_CK - g_CK > LOWEST, 0.0, dlog_w_CK)
        store_tile(dg_ptr, start + i, at_K, H * K, 1, T, K, dlog_w_CK)
    else:
        store_tile(dg_ptr, i, at_K, H * K, 1, C, K, dg_CK)


@triton.jit
def keys_of(
    r_ptr, do_ptr, a_ptr, dy_ptr, k_ptr, v_ptr, b_ptr, z_ptr, u_ptr, g_ptr, states_ptr, d_states_ptr, rk_ptr, own_ptr,
    dr_ptr, da_ptr, dk_ptr, db_ptr, du_ptr, g_CK, start, at_K,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BONUS: tl.constexpr, LOW_RANK: tl.constexpr, TIED: tl.constexpr, FAR: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute `keys_kernel` for one chunk, and return dg; FAR if some sum is below -BOUND.

    Pointers point to the head and chunk. Readers before their own decay have their rows in the order 1, ..., C - 1, 0.
    Row i then contributes to dg_i, and its sum is g_i, except in the last row, where it is 0.
    """
    n_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    HAS_B: tl.constexpr = LOW_RANK and not TIED
    PART: tl.constexpr = V % BLOCK != 0
    PART_K: tl.constexpr = K % KEYS != 0
    i = tl.arange(0, C)
    next_C = (i + 1) % C
    place = next_C if BONUS else i
    is_last = i[:, None] == C - 1
    dtype = k_ptr.dtype.element_ty
    ak_ptr, rb_ptr, ab_ptr = rk_ptr + C * C, rk_ptr + 2 * C * C, rk_ptr + 3 * C * C
    end_K = tl.load(g_ptr + (C - 1) * H * K + at_K, mask=at_K < K, other=0.0)
    r_CK = load_tile(r_ptr, start + place, at_K, H * K, 1, T, K, BOUNDED, PART_K)
    k_CK = load_tile(k_ptr, start + i, at_K, H * K, 1, T, K, BOUNDED, PART_K)
    writes_CK, by_CK = from_start(g_CK, False, FAR), from_start(g_CK, True, FAR)
    by_last_CK = tl.where(is_last, 1.0, by_CK)
    before_CK = tl.where(is_last, 0.0, g_CK)
    r_sums_CK, by_r_CK = before_CK if BONUS else g_CK, by_last_CK if BONUS else by_CK
    start_k_CK, start_r_CK = (k_CK * writes_CK).to(dtype), (r_CK * by_r_CK).to(dtype)
    a_CK, b_CK, start_a_CK, start_b_CK = r_CK, k_CK, start_r_CK, start_k_CK
    if LOW_RANK:
        a_CK = load_tile(a_ptr, start + next_C, at_K, H * K, 1, T, K, BOUNDED, PART_K)
        start_a_CK = (a_CK * by_last_CK).to(dtype)
    if HAS_B:
        b_CK = load_tile(b_ptr, start + i, at_K, H * K, 1, T, K, BOUNDED, PART_K)
        start_b_CK = (b_CK * writes_CK).to(dtype)
    own_r_CK, own_k_CK, u_K = r_CK, k_CK, tl.zeros([KEYS], tl.float32) + 1
    if BONUS:
        own_r_CK = load_tile(r_ptr, start + i, at_K, H * K, 1, T, K, BOUNDED, PART_K)
        own_k_CK = load_tile(k_ptr, start + place, at_K, H * K, 1, T, K, BOUNDED, PART_K)
        u_K = tl.load(u_ptr + at_K, mask=at_K < K, other=0.0)

    dx_CK = from_state(do_ptr, states_ptr, start + place, at_K, T, H, K, V, KEYS, C, BLOCK, BOUNDED, PRECISION, STAGES)
    dx_CK, _ = gradient(
        dx_CK, by_r_CK, r_sums_CK, end_K, place, rk_ptr, k_CK, start_k_CK, g_CK, i, rb_ptr, b_CK, start_b_CK, g_CK, i,
        g_ptr, at_K, H * K, K, C, True, HAS_B, FAR, PRECISION,
    )  # fmt: skip
    dg_CK = tl.where(is_last, 0.0, r_CK * dx_CK) if BONUS else r_CK * dx_CK
    own_CK = tl.load(own_ptr + place)[:, None] * own_k_CK
    if HAS_B:
        own_CK += tl.load(own_ptr + C + i)[:, None] * b_CK
    if BONUS:
        tl.store(du_ptr + at_K, tl.sum(own_CK * r_CK, 0), mask=at_K < K)
        own_CK *= u_K[None, :]
    store_tile(dr_ptr, start + place, at_K, H * K, 1, T, K, dx_CK + own_CK)
    if LOW_RANK:
        dx_CK = from_state(
            dy_ptr, states_ptr, start + next_C, at_K, T, H, K, V, KEYS, C, BLOCK, BOUNDED, PRECISION, STAGES
        )
        dx_CK, _ = gradient(
            dx_CK, by_last_CK, before_CK, end_K, next_C, ak_ptr, k_CK, start_k_CK, g_CK, i, ab_ptr, b_CK, start_b_CK,
            g_CK, i, g_ptr, at_K, H * K, K, C, True, HAS_B, FAR, PRECISION,
        )  # fmt: skip
        store_tile(da_ptr, start + next_C, at_K, H * K, 1, T, K, dx_CK)
        dg_CK += tl.where(is_last, 0.0, a_CK * dx_CK)

    dx_CK = from_state(v_ptr, d_states_ptr, start + i, at_K, T, H, K, V, KEYS, C, BLOCK, BOUNDED, PRECISION, STAGES)
    dx_CK, through_CK = gradient(
        dx_CK, writes_CK, g_CK, end_K, i, rk_ptr, r_CK, start_r_CK, r_sums_CK, place, ak_ptr, a_CK, start_a_CK,
        before_CK, next_C, g_ptr, at_K, H * K, K, C, False, LOW_RANK, FAR, PRECISION,
    )  # fmt: skip
    through_CK *= k_CK
    dg_CK -= k_CK * dx_CK
    own_CK = tl.load(own_ptr + i)[:, None] * own_r_CK
    if BONUS:
        own_CK *= u_K[None, :]
    store_tile(dk_ptr, start + i, at_K, H * K, 1, T, K, dx_CK + own_CK)
    if HAS_B:
        dx_CK = from_state(z_ptr, d_states_ptr, start + i, at_K, T, H, K, V, KEYS, C, BLOCK, BOUNDED, PRECISION, STAGES)
        dx_CK, through_b_CK = gradient(
            dx_CK, writes_CK, g_CK, end_K, i, rb_ptr, r_CK, start_r_CK, g_CK, i, ab_ptr, a_CK, start_a_CK, before_CK,
            next_C, g_ptr, at_K, H * K, K, C, False, True, FAR, PRECISION,
        )  # fmt: skip
        through_CK += b_CK * through_b_CK
        dg_CK -= b_CK * dx_CK
        own_CK = tl.load(own_ptr + C + i)[:, None] * own_r_CK
        store_tile(db_ptr, start + i, at_K, H * K, 1, T, K, dx_CK + own_CK)

    overlap_K = tl.zeros([KEYS], tl.float32)
    for block in tl.range(0, n_blocks):
        at_V = block * BLOCK + tl.arange(0, BLOCK)
        s_VK = load_tile(states_ptr, at_V, at_K, 1, V, V, K, PART, PART_K).to(tl.float32)
        ds_VK = load_tile(d_states_ptr, at_V, at_K, 1, V, V, K, PART, PART_K)
        overlap_K += tl.sum(s_VK * ds_VK.to(tl.float32), 0)
    end_K = overlap_K * tl.exp2(end_K) + tl.sum(through_CK, 0)
    dg_CK += tl.where(is_last, end_K[None, :], 0.0)
    return dg_CK


@triton.jit
def from_state(
    x_ptr, s_ptr, row, at_K,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return [C, KEYS]: rows of x [T, H, V] times the transposed state [K, V]."""
    n_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    PART: tl.constexpr = V % BLOCK != 0
    PART_K: tl.constexpr = K % KEYS != 0
    y_CK = tl.zeros([C, KEYS], tl.float32)
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_V = block * BLOCK + tl.arange(0, BLOCK)
        x_CV = load_tile(x_ptr, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        s_VK = load_tile(s_ptr, at_V, at_K, 1, V, V, K, PART, PART_K)
        y_CK = tl.dot(x_CV, s_VK, y_CK, input_precision=PRECISION)
    return y_CK


@triton.jit
def gradient(
    state_CK, by_CK, x_sums_CK, end_K, x_place, p_ptr, y_CK, start_y_CK, y_sums_CK, y_place, q_ptr, z_CK, start_z_CK,
    z_sums_CK, z_place, g_ptr, at_K,
    stride: tl.constexpr, K: tl.constexpr, C: tl.constexpr, READS: tl.constexpr, TWO: tl.constexpr, FAR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradient of x and its part that comes from the state.

    x is a reader with READS, otherwise a writer. state_CK is the state's part without decays. p [C, C] (rows: readers,
    columns: earlier writers) is the gradient of the scores of x and y; with TWO, q is the same for x and z. by is x's
    `from_start` weight, start_y and start_z are y and z times theirs, and *_place are the positions of the rows. FAR as
    in `keys_of`.
    """
    if FAR:
        state_CK *= tl.exp2(x_sums_CK if READS else end_K[None, :] - x_sums_CK)
        dx_CK = tl.dot(pairs(p_ptr, C, READS), start_y_CK, input_precision=PRECISION)
    else:
        if not READS:
            state_CK *= tl.exp2(end_K)[None, :]
        dx_CK = tl.dot(pairs(p_ptr, C, READS), start_y_CK, state_CK, input_precision=PRECISION)
        state_CK *= by_CK
    if TWO:
        dx_CK = tl.dot(pairs(q_ptr, C, READS), start_z_CK, dx_CK, input_precision=PRECISION)
    dx_CK *= by_CK
    if FAR:
        dx_CK = state_CK + tl.where(by_CK > 0, dx_CK, 0.0)  # a product whose weight is 0 may be infinite
        key = at_K[None, :]
        half = C // 2
        for _ in range(6 if C == 64 else 5 if C == 32 else 4):
            block_CC = tl.where(in_same_block(x_place[:, None], y_place[None, :], half), pairs(p_ptr, C, READS), 0.0)
            by_y_CK = from_middle(g_ptr, y_sums_CK, y_place[:, None], key, half, stride, K, not READS)
            far_CK = tl.dot(block_CC.to(y_CK.dtype), (y_CK * by_y_CK).to(y_CK.dtype), input_precision=PRECISION)
            if TWO:
                block_CC = tl.where(
                    in_same_block(x_place[:, None], z_place[None, :], half), pairs(q_ptr, C, READS), 0.0
                )
                by_y_CK = from_middle(g_ptr, z_sums_CK, z_place[:, None], key, half, stride, K, not READS)
                far_CK += tl.dot(block_CC.to(y_CK.dtype), (z_CK * by_y_CK).to(y_CK.dtype), input_precision=PRECISION)
            dx_CK += from_middle(g_ptr, x_sums_CK, x_place[:, None], key, half, stride, K, READS) * far_CK
            half = half >> 1
    return dx_CK, state_CK


@triton.jit
def pairs(p_ptr, C: tl.constexpr, READS: tl.constexpr):
    """Return the [C, C] tile at `p_ptr`, transposed unless READS."""
    i = tl.arange(0, C)
    return load_tile(p_ptr, i, i, C if READS else 1, 1 if READS else C, C, C, False, False)
