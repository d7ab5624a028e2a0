"""Triton kernels of RWKV-7's recurrence operands: one pass per direction.

    operand                       shape                 dtype    meaning
    r, k, v, first                [B, T, H, K]          input    projections, the first layer's values
    z_w, z_a, z_v                 [B, T, H, K]          input    low-rank products, without bias
    vectors                       [B, 5 or 6, H, K]     fp32     k_k, k_a, r_k, and the biases of w, a and (MIX) v
    key, a, b, value              [B, T, H, K]          input    results
    log_w;  bonus                 [B, T, H, K]; [B, T, H] fp32   results
    d_*                           as the results                 result gradients
    dr, dk, dz_*, dv, dfirst      [B, T, H, K]          input    operand gradients
    parts                         [B, c, 5 or 6, H, K]  fp32     vector gradients, summed within each chunk of tokens

    log w = -e^{-1/2} sigmoid(z_w),   eta = sigmoid(z_a),   kappa = k k_k / |k k_k|,   a = -kappa,   b = kappa eta
    key = k (1 + (eta - 1) k_a),   value = v + (first - v) sigmoid(z_v),   bonus = sum over a head of r key r_k

One program handles TOKENS x STEPS consecutive tokens and HEADS heads, in tiles of R = TOKENS x HEADS rows of K
channels, as in the head norm, with which it shares functions. Decays, keys and values share no operand. The backward
kernel therefore has three loops, each with all registers for its sums. Equations and source:
`wkv7_operands/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.head_norm.triton.kernels import data, parameter, place_of, store_sums
from kernels_pallas.short_conv.triton.kernels import sigmoid
from kernels_pallas.triton.tile_io import store_rows

LOG_W = tl.constexpr(-0.6065306597126334)  # -e^{-1/2}


@triton.jit
def rows_of(chunk, step, first, T: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the rows of [T, H] that a tile covers; T H for missing rows."""
    row = tl.arange(0, TOKENS * HEADS)
    token, head = (chunk + step) * TOKENS + row // HEADS, first + row % HEADS
    return tl.where((head < H) & (token < T), token * H + head, T * H)


@triton.jit
def removed(k_RK, k_k_RK):
    """Return kappa, its scale 1 / |k k_k|, and whether |k k_k| exceeds 1e-12.

    Below 1e-12 the scale is constant and has no gradient.
    """
    kappa_RK = k_RK * k_k_RK
    square_R1 = tl.sum(kappa_RK * kappa_RK, 1)[:, None]
    scale_R1 = tl.rsqrt(tl.maximum(square_R1, 1e-24))
    return kappa_RK * scale_R1, scale_R1, square_R1 > 1e-24


@triton.jit
def forward_kernel(
    r_ptr, k_ptr, z_w_ptr, z_a_ptr, v_ptr, first_ptr, z_v_ptr, vectors_ptr,
    key_ptr, log_w_ptr, a_ptr, b_ptr, bonus_ptr, value_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """Compute the results for one program's tokens and heads."""
    b, chunk, _, first = place_of(tl.program_id(0), T, H, HEADS, TOKENS * STEPS)
    head = first + tl.arange(0, TOKENS * HEADS) % HEADS
    vectors_ptr += b * ((6 if MIX else 5) * H * K)
    k_k_RK, k_a_RK = parameter(vectors_ptr, head, H, K, KP), parameter(vectors_ptr + H * K, head, H, K, KP)
    r_k_RK = parameter(vectors_ptr + 2 * H * K, head, H, K, KP)
    bias_w_RK = parameter(vectors_ptr + 3 * H * K, head, H, K, KP)
    bias_a_RK = parameter(vectors_ptr + 4 * H * K, head, H, K, KP)
    if MIX:
        bias_v_RK = parameter(vectors_ptr + 5 * H * K, head, H, K, KP)
    entry = b * (T * H * K)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = rows_of(chunk * STEPS, step, first, T, H, HEADS, TOKENS)
        r_RK, k_RK = data(r_ptr + entry, at, T, H, K, KP), data(k_ptr + entry, at, T, H, K, KP)
        z_w_RK, z_a_RK = data(z_w_ptr + entry, at, T, H, K, KP), data(z_a_ptr + entry, at, T, H, K, KP)
        if MIX:
            v_RK, z_v_RK = data(v_ptr + entry, at, T, H, K, KP), data(z_v_ptr + entry, at, T, H, K, KP)
            delta_RK = data(first_ptr + entry, at, T, H, K, KP) - v_RK
        store_rows(log_w_ptr + entry, at, K, T * H, sigmoid(z_w_RK + bias_w_RK) * LOG_W, K, KP)
        eta_RK = sigmoid(z_a_RK + bias_a_RK)
        kappa_RK = removed(k_RK, k_k_RK)[0]
        store_rows(a_ptr + entry, at, K, T * H, -kappa_RK, K, KP)
        store_rows(b_ptr + entry, at, K, T * H, kappa_RK * eta_RK, K, KP)
        key_RK = k_RK * (1.0 + (eta_RK - 1.0) * k_a_RK)
        store_rows(key_ptr + entry, at, K, T * H, key_RK, K, KP)
        tl.store(bonus_ptr + b * (T * H) + at, tl.sum(r_RK * key_RK * r_k_RK, 1), mask=at < T * H)
        if MIX:
            store_rows(value_ptr + entry, at, K, T * H, v_RK + delta_RK * sigmoid(z_v_RK + bias_v_RK), K, KP)


@triton.jit
def backward_kernel(
    r_ptr, k_ptr, z_w_ptr, z_a_ptr, v_ptr, first_ptr, z_v_ptr, vectors_ptr,
    d_r_ptr, d_key_ptr, d_log_w_ptr, d_a_ptr, d_b_ptr, d_bonus_ptr, d_value_ptr, d_skip_ptr, d_first_ptr,
    dr_ptr, dk_ptr, dz_w_ptr, dz_a_ptr, dv_ptr, dfirst_ptr, dz_v_ptr, parts_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of all operands for one program's tokens and heads.

    `d_*` are the gradients of the results. Vector gradients are sums over the program's tokens.
    """
    N: tl.constexpr = 6 if MIX else 5
    b, chunk, place, first = place_of(tl.program_id(0), T, H, HEADS, TOKENS * STEPS)
    head = first + tl.arange(0, TOKENS * HEADS) % HEADS
    vectors_ptr += b * (N * H * K)
    parts_ptr += place * (N * H * K)
    entry = b * (T * H * K)
    zero_RK = tl.zeros([TOKENS * HEADS, KP], tl.float32)

    bias_RK = parameter(vectors_ptr + 3 * H * K, head, H, K, KP)
    dbias_RK = zero_RK
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = rows_of(chunk * STEPS, step, first, T, H, HEADS, TOKENS)
        z_RK, d_RK = data(z_w_ptr + entry, at, T, H, K, KP), data(d_log_w_ptr + entry, at, T, H, K, KP)
        decay_RK = sigmoid(z_RK + bias_RK)
        dz_RK = d_RK * LOG_W * decay_RK * (1.0 - decay_RK)
        store_rows(dz_w_ptr + entry, at, K, T * H, dz_RK, K, KP)
        dbias_RK += dz_RK
    store_sums(parts_ptr + 3 * H * K, first, dbias_RK, H, K, KP, HEADS, TOKENS)

    k_k_RK, k_a_RK = parameter(vectors_ptr, head, H, K, KP), parameter(vectors_ptr + H * K, head, H, K, KP)
    r_k_RK = parameter(vectors_ptr + 2 * H * K, head, H, K, KP)
    bias_RK = parameter(vectors_ptr + 4 * H * K, head, H, K, KP)
    dk_k_RK, dk_a_RK, dr_k_RK, dbias_RK = zero_RK, zero_RK, zero_RK, zero_RK
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = rows_of(chunk * STEPS, step, first, T, H, HEADS, TOKENS)
        r_RK, k_RK = data(r_ptr + entry, at, T, H, K, KP), data(k_ptr + entry, at, T, H, K, KP)
        z_RK, d_r_RK = data(z_a_ptr + entry, at, T, H, K, KP), data(d_r_ptr + entry, at, T, H, K, KP)
        d_a_RK, d_b_RK = data(d_a_ptr + entry, at, T, H, K, KP), data(d_b_ptr + entry, at, T, H, K, KP)
        dkey_RK = data(d_key_ptr + entry, at, T, H, K, KP)
        d_bonus_R1 = tl.load(d_bonus_ptr + b * (T * H) + at, mask=at < T * H, other=0.0)[:, None]
        eta_RK = sigmoid(z_RK + bias_RK)
        factor_RK = 1.0 + (eta_RK - 1.0) * k_a_RK
        key_RK = d_bonus_R1 * k_RK * factor_RK
        store_rows(dr_ptr + entry, at, K, T * H, d_r_RK + key_RK * r_k_RK, K, KP)
        dr_k_RK += key_RK * r_RK
        dkey_RK += d_bonus_R1 * r_RK * r_k_RK
        dk_a_RK += dkey_RK * k_RK * (eta_RK - 1.0)
        kappa_RK, scale_R1, is_long_R1 = removed(k_RK, k_k_RK)
        dz_RK = (dkey_RK * k_RK * k_a_RK + d_b_RK * kappa_RK) * eta_RK * (1.0 - eta_RK)
        store_rows(dz_a_ptr + entry, at, K, T * H, dz_RK, K, KP)
        dbias_RK += dz_RK
        dkappa_RK = d_b_RK * eta_RK - d_a_RK
        along_R1 = tl.where(is_long_R1, tl.sum(dkappa_RK * kappa_RK, 1)[:, None], 0.0)
        dkappa_RK = scale_R1 * (dkappa_RK - kappa_RK * along_R1)
        store_rows(dk_ptr + entry, at, K, T * H, dkey_RK * factor_RK + dkappa_RK * k_k_RK, K, KP)
        dk_k_RK += dkappa_RK * k_RK
    store_sums(parts_ptr, first, dk_k_RK, H, K, KP, HEADS, TOKENS)
    store_sums(parts_ptr + H * K, first, dk_a_RK, H, K, KP, HEADS, TOKENS)
    store_sums(parts_ptr + 2 * H * K, first, dr_k_RK, H, K, KP, HEADS, TOKENS)
    store_sums(parts_ptr + 4 * H * K, first, dbias_RK, H, K, KP, HEADS, TOKENS)

    if MIX:
        bias_RK = parameter(vectors_ptr + 5 * H * K, head, H, K, KP)
        dbias_RK = zero_RK
        for step in tl.range(0, STEPS, num_stages=STAGES):
            at = rows_of(chunk * STEPS, step, first, T, H, HEADS, TOKENS)
            v_RK, z_RK = data(v_ptr + entry, at, T, H, K, KP), data(z_v_ptr + entry, at, T, H, K, KP)
            delta_RK = data(first_ptr + entry, at, T, H, K, KP) - v_RK
            dv_RK = data(d_value_ptr + entry, at, T, H, K, KP) + data(d_skip_ptr + entry, at, T, H, K, KP)
            d_first_RK = data(d_first_ptr + entry, at, T, H, K, KP)
            share_RK = sigmoid(z_RK + bias_RK)
            store_rows(dv_ptr + entry, at, K, T * H, dv_RK * (1.0 - share_RK), K, KP)
            dv_RK *= share_RK
            store_rows(dfirst_ptr + entry, at, K, T * H, d_first_RK + dv_RK, K, KP)
            dz_RK = dv_RK * (1.0 - share_RK) * delta_RK
            store_rows(dz_v_ptr + entry, at, K, T * H, dz_RK, K, KP)
            dbias_RK += dz_RK
        store_sums(parts_ptr + 5 * H * K, first, dbias_RK, H, K, KP, HEADS, TOKENS)
