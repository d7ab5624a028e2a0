"""Triton kernels of KDA and Gated DeltaNet-2 from the pre-activations of their gates.

    kernel    one program per batch entry, head and     writes
    weights   chunk                                     q~, a~, k^, the sums of whole chunks, a|k and N = q|k
    keys      chunk and KEYS key channels               the gradients of everything but v

    operand          shape                    dtype   meaning
    q, k             [B, T, H, K]             input
    decay            [B, T, H, K]             input   pre-activation of the decay, without bias
    beta             [B, T, H]; [B, T, H, K]  fp32; input   pre-activation of the gates; CHANNELS: of erase gates
    rate, bias       [B, H], [B, H, K]        fp32    rate and bias of the decay
    q_in, a_in       [B, T, H, K]             input   readers times their decay from the chunk start, q~ and a~
    k_out            [B, T, H, K]             input   written keys times their decay to the chunk end, k^
    ends             [B, c, H, K]             fp32    g of each chunk's last position, base 2
    pairs, n         [B, T, H, C]             fp32, input   a|k, which `solve` inverts; N, with the diagonal
    do, dy, z        [B, T, H, V]             input   gradients of O and Z; Z
    d_pairs, own     [B, c, H, 2, C, C], [B, c, H, 1, C]   d(q|k) and d(a|k); the diagonal of d(q|k) (`d_scores`)
    drate, dbias     [B, c, H, K]             fp32    gradients, summed over the chunk; rates also per channel
    sums             [B, c C, H, K]           fp32    scratch: g, written only in chunks of strong decays

    log w = -rate softplus(decay + bias), or LOWER sigmoid(rate (decay + bias))
    a = -k and written keys sigmoid(beta) k; CHANNELS: a = -sigmoid(beta) k and keys k

The reader a follows its own decay, like q, so both have the same weights. g is never in memory, except in chunks with
sums below -BOUND (linear_attention/triton/weight_kernels.py). `solve`, `pass` and `d_scores` are linear_attention's.
Equations: `kda/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.linear_attention import interface
from kernels_pallas.linear_attention.triton.keys_kernels import gradient
from kernels_pallas.linear_attention.triton.weight_kernels import (
    BOUND,
    from_middle,
    from_start,
    halvings_of,
    in_same_block,
    load_sums,
)
from kernels_pallas.short_conv.triton.kernels import sigmoid
from kernels_pallas.triton.tile_io import LOG2_E, load_tile, place_of, store_tile

FLOOR = tl.constexpr(interface.FLOOR)


@triton.jit
def softplus(x):
    """Return log(1 + e^x) with relative precision, as log1p(u) = 2 artanh(u / (2 + u)) of u = e^{-|x|}."""
    u = tl.exp2(-tl.abs(x) * LOG2_E)
    s = u / (2.0 + u)
    s2 = s * s
    series = 1 / 3 + s2 * (1 / 5 + s2 * (1 / 7 + s2 * (1 / 9 + s2 * (1 / 11 + s2 * (1 / 13)))))
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + s2 * series)


@triton.jit
def load_steps(decay_ptr, bias_ptr, row, at_K, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, BOUNDED: tl.constexpr):
    """Return decay + bias of a tile."""
    x_CK = load_tile(decay_ptr, row, at_K, H * K, 1, T, K, BOUNDED, K % KEYS != 0).to(tl.float32)
    return x_CK + tl.load(bias_ptr + at_K, mask=at_K < K, other=0.0)[None, :]


@triton.jit
def sums_of(
    decay_ptr, bias_ptr, rate, row, at_K,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, LOWER: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Return g of a chunk, [C, KEYS], base 2; log decays below FLOOR count as FLOOR."""
    x_CK = load_steps(decay_ptr, bias_ptr, row, at_K, T, H, K, KEYS, BOUNDED)
    log_w_CK = -rate * softplus(x_CK) if LOWER == 0 else LOWER * sigmoid(rate * x_CK)
    log_w_CK = tl.where(log_w_CK < FLOOR, FLOOR, log_w_CK) * LOG2_E  # keeps NaN, unlike a maximum
    if BOUNDED:
        log_w_CK = tl.where((row < T)[:, None], log_w_CK, 0.0)
    return tl.cumsum(log_w_CK, 0)


@triton.jit
def last_row(x_CK, i, C: tl.constexpr):
    return tl.sum(tl.where(i[:, None] == C - 1, x_CK, 0.0), 0)


@triton.jit
def weights_kernel(
    q_ptr, k_ptr, decay_ptr, beta_ptr, rate_ptr, bias_ptr,
    q_in_ptr, a_in_ptr, k_out_ptr, ends_ptr, pairs_ptr, n_ptr, sums_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr,
    LOWER: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the weighted operands and both scores of a chunk and head.

    Scores have the readers k instead of a, and the writers k. Sign and gates follow at the end.
    """
    n_blocks: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = K % KEYS != 0
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i = tl.arange(0, C)
    row = start + i
    in_K = b * T * H * K + h * K
    q_ptr += in_K
    k_ptr += in_K
    decay_ptr += in_K
    bias_ptr += (b * H + h) * K
    sums_ptr += head // H * (C * H * K) + h * K
    rate = tl.load(rate_ptr + b * H + h)
    dtype = q_ptr.dtype.element_ty
    if CHANNELS:
        beta_ptr += in_K
    else:
        gate_C = sigmoid(tl.load(beta_ptr + b * T * H + h + row * H, mask=row < T, other=0.0))
    m_CC, n_CC, own_C = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    lowest = 0.0
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_K = block * KEYS + tl.arange(0, KEYS)
        q_CK = load_tile(q_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
        k_CK = load_tile(k_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
        g_CK = sums_of(decay_ptr, bias_ptr, rate, row, at_K, T, H, K, KEYS, LOWER, BOUNDED)
        lowest = tl.minimum(lowest, tl.min(tl.min(g_CK, 1), 0))
        end_K = last_row(g_CK, i, C)
        tl.store(ends_ptr + head * K + at_K, end_K, mask=at_K < K)
        k_out_CK = k_CK * tl.exp2(end_K[None, :] - g_CK)
        a_CK = k_CK
        if CHANNELS:
            a_CK *= sigmoid(load_tile(beta_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32))
        else:
            k_out_CK *= gate_C[:, None]
        store_tile(k_out_ptr + in_K, row, at_K, H * K, 1, T, K, k_out_CK)
        own_C += tl.sum(q_CK * k_CK, 1)
        right_KC = tl.trans((k_CK * from_start(g_CK, False, True)).to(dtype))
        by_CK = tl.exp2(g_CK)
        store_tile(q_in_ptr + in_K, row, at_K, H * K, 1, T, K, q_CK * by_CK)
        store_tile(a_in_ptr + in_K, row, at_K, H * K, 1, T, K, -a_CK * by_CK)
        by_CK = tl.where(g_CK >= -BOUND, by_CK, 0.0)
        n_CC = tl.dot((q_CK * by_CK).to(dtype), right_KC, n_CC, input_precision=PRECISION)
        m_CC = tl.dot((a_CK * by_CK).to(dtype), right_KC, m_CC, input_precision=PRECISION)
    if lowest < -BOUND:
        for block in range(n_blocks):
            at_K = block * KEYS + tl.arange(0, KEYS)
            g_CK = sums_of(decay_ptr, bias_ptr, rate, row, at_K, T, H, K, KEYS, LOWER, BOUNDED)
            store_tile(sums_ptr, i, at_K, H * K, 1, C, K, g_CK)
        tl.debug_barrier()  # other threads read these sums, in other layouts
        n_CC, m_CC = with_far(
            n_CC, m_CC, q_ptr, k_ptr, beta_ptr, sums_ptr, start, T, H, K, KEYS, C, CHANNELS, BOUNDED, PRECISION
        )
    # Entries above the diagonal, which may be infinite, are masked once, after all sums.
    is_own_CC, is_pair_CC = i[:, None] == i[None, :], i[:, None] > i[None, :]
    n_CC = tl.where(is_own_CC, own_C[:, None], tl.where(is_pair_CC, n_CC, 0.0))
    m_CC = tl.where(is_pair_CC, -m_CC, 0.0)
    if not CHANNELS:
        n_CC *= gate_C[None, :]
        m_CC *= gate_C[None, :]
    store_tile(pairs_ptr + (b * T * H + h) * C, row, i, H * C, 1, T, C, m_CC)
    store_tile(n_ptr + (b * T * H + h) * C, row, i, H * C, 1, T, C, n_CC)


@triton.jit
def with_far(
    n_CC, m_CC, q_ptr, k_ptr, beta_ptr, sums_ptr, start,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return both scores with the readers below -BOUND added."""
    n_blocks: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = K % KEYS != 0
    i = tl.arange(0, C)
    row = start + i
    for block in range(n_blocks):
        at_K = block * KEYS + tl.arange(0, KEYS)
        q_CK = load_tile(q_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART)
        k_CK = load_tile(k_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART)
        a_CK = k_CK.to(tl.float32)
        if CHANNELS:
            a_CK *= sigmoid(load_tile(beta_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32))
        g_CK = load_sums(sums_ptr, i[:, None], at_K[None, :], H * K, K, False)
        halvings = halvings_of(g_CK, C)
        half = halvings * 0 + C // 2
        for _ in range(halvings):
            reads_CK = from_middle(sums_ptr, g_CK, i[:, None], at_K[None, :], half, H * K, K, True)
            writes_CK = from_middle(sums_ptr, g_CK, i[:, None], at_K[None, :], half, H * K, K, False)
            right_KC = tl.trans((k_CK * writes_CK).to(q_CK.dtype))
            is_pair_CC = in_same_block(i[:, None], i[None, :], half)
            far_CC = tl.dot((q_CK * reads_CK).to(q_CK.dtype), right_KC, input_precision=PRECISION)
            n_CC += tl.where(is_pair_CC, far_CC, 0.0)
            far_CC = tl.dot((a_CK * reads_CK).to(q_CK.dtype), right_KC, input_precision=PRECISION)
            m_CC += tl.where(is_pair_CC, far_CC, 0.0)
            half = half >> 1
    return n_CC, m_CC


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, decay_ptr, beta_ptr, rate_ptr, bias_ptr, do_ptr, dy_ptr, z_ptr, states_ptr, d_states_ptr, d_pairs_ptr,
    own_ptr, dq_ptr, dk_ptr, ddecay_ptr, dbeta_ptr, drate_ptr, dbias_ptr, sums_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr, LOWER: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients for KEYS keys of a chunk and head.

    Without CHANNELS, the gradient of beta is [B, T, H, blocks of KEYS] and lacks the derivative of the sigmoid. Chunks
    with sums below -BOUND take a separate branch, as in linear_attention's `keys`.
    """
    n_keys: tl.constexpr = (K + KEYS - 1) // KEYS
    b, h, start, head = place_of(tl.program_id(0) // n_keys, T, H, C)
    at_K = tl.program_id(0) % n_keys * KEYS + tl.arange(0, KEYS)
    in_K, in_V = b * T * H * K + h * K, b * T * H * V + h * V
    q_ptr += in_K
    k_ptr += in_K
    decay_ptr += in_K
    dq_ptr += in_K
    dk_ptr += in_K
    do_ptr += in_V
    dy_ptr += in_V
    z_ptr += in_V
    bias_ptr += (b * H + h) * K
    sums_ptr += head // H * (C * H * K) + h * K
    states_ptr += head * (K * V)
    d_states_ptr += head * (K * V)
    d_pairs_ptr += head * (2 * C * C)
    own_ptr += head * C
    if CHANNELS:
        beta_ptr += in_K
        dbeta_ptr += in_K
    else:
        beta_ptr += b * T * H + h
        dbeta_ptr += (b * T * H + h) * n_keys + tl.program_id(0) % n_keys
    rate = tl.load(rate_ptr + b * H + h)
    i = tl.arange(0, C)
    row = start + i
    g_CK = sums_of(decay_ptr, bias_ptr, rate, row, at_K, T, H, K, KEYS, LOWER, BOUNDED)
    if tl.min(tl.min(g_CK, 1), 0) >= -BOUND:
        dg_CK = keys_of(
            q_ptr, k_ptr, beta_ptr, do_ptr, dy_ptr, z_ptr, states_ptr, d_states_ptr, d_pairs_ptr, own_ptr, dq_ptr,
            dk_ptr, dbeta_ptr, sums_ptr, g_CK, start, at_K, T, H, K, V, KEYS, C, BLOCK, CHANNELS, False, BOUNDED,
            PRECISION, STAGES,
        )  # fmt: skip
    else:
        store_tile(sums_ptr, i, at_K, H * K, 1, C, K, g_CK)
        tl.debug_barrier()
        dg_CK = keys_of(
            q_ptr, k_ptr, beta_ptr, do_ptr, dy_ptr, z_ptr, states_ptr, d_states_ptr, d_pairs_ptr, own_ptr, dq_ptr,
            dk_ptr, dbeta_ptr, sums_ptr, g_CK, start, at_K, T, H, K, V, KEYS, C, BLOCK, CHANNELS, True, BOUNDED,
            PRECISION, STAGES,
        )  # fmt: skip
    dlog_w_CK = tl.cumsum(dg_CK, 0, reverse=True)
    if BOUNDED:
        dlog_w_CK = tl.where((row < T)[:, None], dlog_w_CK, 0.0)
    x_CK = load_steps(decay_ptr, bias_ptr, row, at_K, T, H, K, KEYS, BOUNDED)
    if LOWER == 0:
        by_rate_CK, by_step_CK = -softplus(x_CK), -rate * sigmoid(x_CK)
        log_w_CK = rate * by_rate_CK
    else:
        share_CK = sigmoid(rate * x_CK)
        log_w_CK = LOWER * share_CK
        slope_CK = log_w_CK * (1.0 - share_CK)
        by_rate_CK, by_step_CK = slope_CK * x_CK, slope_CK * rate
    dlog_w_CK = tl.where(log_w_CK < FLOOR, 0.0, dlog_w_CK)  # a log decay below FLOOR has no gradient
    dx_CK = dlog_w_CK * by_step_CK
    store_tile(ddecay_ptr + in_K, row, at_K, H * K, 1, T, K, dx_CK)
    tl.store(dbias_ptr + head * K + at_K, tl.sum(dx_CK, 0), mask=at_K < K)
    tl.store(drate_ptr + head * K + at_K, tl.sum(dlog_w_CK * by_rate_CK, 0), mask=at_K < K)


@triton.jit
def keys_of(
    q_ptr, k_ptr, beta_ptr, do_ptr, dy_ptr, z_ptr, states_ptr, d_states_ptr, qk_ptr, own_ptr, dq_ptr, dk_ptr, dbeta_ptr,
    sums_ptr, g_CK, start, at_K,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr, FAR: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute `keys_kernel` up to the gradient of g, which is returned; FAR if some sum is below -BOUND.

    Pointers point to the head and chunk.
    """
    n_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    n_keys: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = V % BLOCK != 0
    PART_K: tl.constexpr = K % KEYS != 0
    i = tl.arange(0, C)
    row = start + i
    dtype = k_ptr.dtype.element_ty
    dq_CK, da_CK = tl.zeros([C, KEYS], tl.float32), tl.zeros([C, KEYS], tl.float32)
    dk_CK, overlap_K = tl.zeros([C, KEYS], tl.float32), tl.zeros([KEYS], tl.float32)
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_V = block * BLOCK + tl.arange(0, BLOCK)
        s_VK = load_tile(states_ptr, at_V, at_K, 1, V, V, K, PART, PART_K)
        ds_VK = load_tile(d_states_ptr, at_V, at_K, 1, V, V, K, PART, PART_K)
        do_CV = load_tile(do_ptr, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        dy_CV = load_tile(dy_ptr, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        z_CV = load_tile(z_ptr, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        dq_CK = tl.dot(do_CV, s_VK, dq_CK, input_precision=PRECISION)
        da_CK = tl.dot(dy_CV, s_VK, da_CK, input_precision=PRECISION)
        dk_CK = tl.dot(z_CV, ds_VK, dk_CK, input_precision=PRECISION)
        overlap_K += tl.sum(s_VK.to(tl.float32) * ds_VK.to(tl.float32), 0)

    end_K = last_row(g_CK, i, C)
    q_CK = load_tile(q_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART_K)
    key_CK = load_tile(k_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART_K).to(tl.float32)
    if CHANNELS:
        gate_CK = sigmoid(load_tile(beta_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART_K).to(tl.float32))
        a_CK, k_CK = (-gate_CK * key_CK).to(dtype), key_CK.to(dtype)
    else:
        gate_CK = sigmoid(tl.load(beta_ptr + row * H, mask=row < T, other=0.0))[:, None]
        a_CK, k_CK = (-key_CK).to(dtype), (gate_CK * key_CK).to(dtype)
    writes_CK, by_CK = from_start(g_CK, False, FAR), from_start(g_CK, True, FAR)
    start_q_CK, start_a_CK = (q_CK * by_CK).to(dtype), (a_CK * by_CK).to(dtype)
    start_k_CK = (k_CK * writes_CK).to(dtype)
    ak_ptr = qk_ptr + C * C
    own_C1 = tl.load(own_ptr + i)[:, None]
    dq_CK, _ = gradient(
        dq_CK, by_CK, g_CK, end_K, i, qk_ptr, k_CK, start_k_CK, g_CK, i, qk_ptr, k_CK, start_k_CK, g_CK, i, sums_ptr,
        at_K, H * K, K, C, True, False, FAR, PRECISION,
    )  # fmt: skip
    dg_CK = q_CK * dq_CK
    store_tile(dq_ptr, row, at_K, H * K, 1, T, K, dq_CK + own_C1 * k_CK)
    da_CK, _ = gradient(
        da_CK, by_CK, g_CK, end_K, i, ak_ptr, k_CK, start_k_CK, g_CK, i, ak_ptr, k_CK, start_k_CK, g_CK, i, sums_ptr,
        at_K, H * K, K, C, True, False, FAR, PRECISION,
    )  # fmt: skip
    dg_CK += a_CK * da_CK
    dk_CK, through_CK = gradient(
        dk_CK, writes_CK, g_CK, end_K, i, qk_ptr, q_CK, start_q_CK, g_CK, i, ak_ptr, a_CK, start_a_CK, g_CK, i,
        sums_ptr, at_K, H * K, K, C, False, True, FAR, PRECISION,
    )  # fmt: skip
    dg_CK -= k_CK * dk_CK
    end_K = overlap_K * tl.exp2(end_K) + tl.sum(through_CK * k_CK, 0)
    dg_CK += tl.where(i[:, None] == C - 1, end_K[None, :], 0.0)
    dk_CK += own_C1 * q_CK
    if CHANNELS:
        store_tile(dbeta_ptr, row, at_K, H * K, 1, T, K, -da_CK * key_CK * gate_CK * (1.0 - gate_CK))
        dk_CK -= gate_CK * da_CK
    else:
        tl.store(dbeta_ptr + row * (H * n_keys), tl.sum(dk_CK * key_CK, 1), mask=row < T)
        dk_CK = gate_CK * dk_CK - da_CK
    store_tile(dk_ptr, row, at_K, H * K, 1, T, K, dk_CK)
    return dg_CK
