"""Triton kernels of KDA and Gated DeltaNet-2 from the pre-activations of their gates.

    kernel    one program per batch entry, head and     writes
    weights   chunk                                     q~, a~, k^, the sums of whole chunks, a|k and N = q|k
    keys      chunk                                     all gradients except dv

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
    drate, dbias     [B, c, H], [B, c, H, K]  fp32    gradients, summed over the chunk
    sums             [B, c C, H, K]           fp32    scratch: g, written only in chunks of strong decays

    log w = -rate softplus(decay + bias), or LOWER sigmoid(rate (decay + bias))
    a = -k and written keys sigmoid(beta) k; CHANNELS: a = -sigmoid(beta) k and keys k

The reader a follows its own decay, like q, so both have the same weights. g is never in memory, except where sums are
below -NEAR, which takes the two paths of linear_attention/triton/weight_kernels.py. `solve`, `pass` and `d_scores` are
linear_attention's. Equations: `kda/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.linear_attention import interface
from kernels_pallas.linear_attention.triton.keys_kernels import gradient, pairs
from kernels_pallas.linear_attention.triton.weight_kernels import from_start, in_same_block, load_sums
from kernels_pallas.short_conv.triton.kernels import sigmoid
from kernels_pallas.triton.tile_io import LN2, LOG2_E, load_tile, place_of, store_tile

LOWEST = tl.constexpr(interface.FLOOR * LOG2_E.value)
# Sums of at least -NEAR take one product, in which readers have the weight 2^{g + SHIFT} and writers its inverse. Both
# are between 2^-100 and 2^100, so float32 and bf16 hold them, operands of 2^-20 and gradients of 2^20 times them.
SHIFT, UNSHIFT, NEAR = tl.constexpr(46.0), tl.constexpr(2.0**-46), tl.constexpr(146.0)


@triton.jit
def softplus(x, PRECISE: tl.constexpr):
    """Return log(1 + e^x) to base 2 for x to base 2.

    PRECISE has the relative precision of float32, as log1p(u) = 2 artanh(u / (2 + u)) of u = 2^{-|x|}. Otherwise the
    error is 2^-22, which is below the rounding of a 16-bit x.
    """
    u = tl.exp2(-tl.abs(x))
    if PRECISE:
        s = u / (2.0 + u)
        s2 = s * s
        series = 1 / 3 + s2 * (1 / 5 + s2 * (1 / 7 + s2 * (1 / 9 + s2 * (1 / 11 + s2 * (1 / 13)))))
        log = (2.0 * LOG2_E) * s * (1.0 + s2 * series)
    else:
        log = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + u], tl.float32, True, 1)
    return tl.maximum(x, 0.0) + log


@triton.jit
def sums_before(C: tl.constexpr, PRECISE: tl.constexpr):
    """Return the matrix whose product with x is the running sum of x, [C, C]."""
    i = tl.arange(0, C)
    return (i[:, None] >= i[None, :]).to(tl.float32 if PRECISE else tl.bfloat16)


@triton.jit
def over_time(matrix_CC, x_CK, PARTS: tl.constexpr, PRECISE: tl.constexpr):
    """Return matrix @ x in float32 for a matrix of zeros and ones: sums over positions.

    Without PRECISE, x is split into PARTS bf16 numbers; three keep every bit. `tl.cumsum` and `tl.sum` take more
    instructions and wait more often for other threads.
    """
    if PRECISE:
        y_CK = tl.dot(matrix_CC, x_CK, input_precision="tf32x3")
    else:
        y_CK = tl.zeros(x_CK.shape, tl.float32)
        for part in tl.static_range(PARTS):
            part_CK = x_CK
            if part + 1 < PARTS:  # the upper 16 bits; the last part is rounded
                part_CK = (x_CK.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
            y_CK = tl.dot(matrix_CC, part_CK.to(tl.bfloat16), y_CK)
            x_CK -= part_CK
    return y_CK


@triton.jit
def load_steps(
    decay_ptr, bias_ptr, row, at_K,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Return decay + bias of a tile, to base 2."""
    x_CK = load_tile(decay_ptr, row, at_K, H * K, 1, T, K, BOUNDED, K % KEYS != 0).to(tl.float32)
    return x_CK * LOG2_E + (tl.load(bias_ptr + at_K, mask=at_K < K, other=0.0) * LOG2_E)[None, :]


@triton.jit
def log_decays(
    decay_ptr, bias_ptr, rate, row, at_K,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, LOWER: tl.constexpr, PRECISE: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Return the log decays of a chunk, [C, KEYS], base 2; those below FLOOR count as FLOOR."""
    x_CK = load_steps(decay_ptr, bias_ptr, row, at_K, T, H, K, KEYS, BOUNDED)
    if LOWER == 0:
        log_w_CK = -rate * softplus(x_CK, PRECISE)
    else:
        log_w_CK = (LOWER * LOG2_E) * sigmoid(x_CK * (rate * LN2))
    log_w_CK = tl.maximum(log_w_CK, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    if BOUNDED:
        log_w_CK = tl.where((row < T)[:, None], log_w_CK, 0.0)
    if K % KEYS != 0:
        log_w_CK = tl.where((at_K < K)[None, :], log_w_CK, 0.0)
    return log_w_CK


@triton.jit
def weights_kernel(
    q_ptr, k_ptr, decay_ptr, beta_ptr, rate_ptr, bias_ptr,
    q_in_ptr, a_in_ptr, k_out_ptr, ends_ptr, pairs_ptr, n_ptr, sums_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    CHANNELS: tl.constexpr, LOWER: tl.constexpr, PRECISE: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the weighted operands and both scores of a chunk and head.

    The scores of the loop are right for chunks whose sums stay above -NEAR. Other chunks compute theirs in a branch,
    from sums with the same bits: the scores of earlier positions do not depend on the branch.
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
    q_in_ptr += in_K
    a_in_ptr += in_K
    k_out_ptr += in_K
    bias_ptr += (b * H + h) * K
    rate = tl.load(rate_ptr + b * H + h)
    dtype = q_ptr.dtype.element_ty
    gate_C = tl.zeros([C], tl.float32) + 1.0
    if CHANNELS:
        beta_ptr += in_K
    else:
        gate_C = sigmoid(tl.load(beta_ptr + b * T * H + h + row * H, mask=row < T, other=0.0))
    a_CC, n_CC, before_CC = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32), sums_before(C, PRECISE)
    later_CC = (i[None, :] > i[:, None]).to(before_CC.dtype)
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_K = block * KEYS + tl.arange(0, KEYS)
        log_w_CK = log_decays(decay_ptr, bias_ptr, rate, row, at_K, T, H, K, KEYS, LOWER, PRECISE, BOUNDED)
        q_CK = load_tile(q_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
        k_CK = load_tile(k_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
        g_CK = over_time(before_CC, log_w_CK, 3, PRECISE)
        to_end_CK = over_time(later_CC, log_w_CK, 3, PRECISE)
        tl.store(
            ends_ptr + head * K + at_K[None, :] + 0 * i[:, None], g_CK, mask=(i[:, None] == C - 1) & (at_K < K)[None, :]
        )
        store_tile(k_out_ptr, row, at_K, H * K, 1, T, K, k_CK * tl.exp2(to_end_CK) * gate_C[:, None])
        g_CK += SHIFT
        by_CK, right_KC = tl.exp2(g_CK), tl.trans((k_CK * tl.exp2(-g_CK)).to(dtype))
        q_CK *= by_CK
        store_tile(q_in_ptr, row, at_K, H * K, 1, T, K, q_CK * UNSHIFT)
        n_CC = tl.dot(q_CK.to(dtype), right_KC, n_CC, input_precision=PRECISION)
        a_CK = -k_CK
        if CHANNELS:
            a_CK *= sigmoid(load_tile(beta_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32))
        a_CK *= by_CK
        store_tile(a_in_ptr, row, at_K, H * K, 1, T, K, a_CK * UNSHIFT)
        a_CC = tl.dot(a_CK.to(dtype), right_KC, a_CC, input_precision=PRECISION)
    pairs_ptr += (b * T * H + h) * C
    n_ptr += (b * T * H + h) * C
    tl.debug_barrier()  # other threads wrote the ends
    key = tl.arange(0, KP)
    if tl.min(tl.load(ends_ptr + head * K + key, mask=key < K, other=0.0), 0) >= -NEAR:
        # Entries above the diagonal, which may be infinite, are masked once, after all sums.
        a_CC = tl.where(i[:, None] > i[None, :], a_CC, 0.0) * gate_C[None, :]
        n_CC = tl.where(i[:, None] >= i[None, :], n_CC, 0.0) * gate_C[None, :]
        store_tile(pairs_ptr, row, i, H * C, 1, T, C, a_CC)
        store_tile(n_ptr, row, i, H * C, 1, T, C, n_CC)
    else:
        sums_ptr += head // H * (C * H * K) + h * K
        for block in range(n_blocks):
            at_K = block * KEYS + tl.arange(0, KEYS)
            log_w_CK = log_decays(decay_ptr, bias_ptr, rate, row, at_K, T, H, K, KEYS, LOWER, PRECISE, BOUNDED)
            store_tile(sums_ptr, i, at_K, H * K, 1, C, K, over_time(before_CC, log_w_CK, 3, PRECISE))
        tl.debug_barrier()  # other threads read these sums, in other layouts
        n_CC = far_scores(
            q_ptr, k_ptr, beta_ptr, sums_ptr, start, T, H, K, KEYS, C, False, CHANNELS, BOUNDED, PRECISION
        )
        store_tile(n_ptr, row, i, H * C, 1, T, C, n_CC * gate_C[None, :])
        a_CC = far_scores(k_ptr, k_ptr, beta_ptr, sums_ptr, start, T, H, K, KEYS, C, True, CHANNELS, BOUNDED, PRECISION)
        a_CC = tl.where(i[:, None] > i[None, :], a_CC, 0.0)
        store_tile(pairs_ptr, row, i, H * C, 1, T, C, a_CC * gate_C[None, :])


@triton.jit
def far_scores(
    x_ptr, k_ptr, beta_ptr, sums_ptr, start,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr, ERASES: tl.constexpr,
    CHANNELS: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return x|k, or with ERASES a|k, below and on the diagonal for a chunk with sums below -NEAR.

    A reader's channels take the product of the near chunks, or where their sum is below -NEAR halved blocks as in
    linear_attention/triton/weight_kernels.py. No result depends on later positions, bit for bit.
    """
    PART: tl.constexpr = K % KEYS != 0
    i = tl.arange(0, C)
    row = start + i
    dtype = k_ptr.dtype.element_ty
    own_C, scores_CC = tl.zeros([C], tl.float32), tl.zeros([C, C], tl.float32)
    for block in range((K + KEYS - 1) // KEYS):
        at_K = block * KEYS + tl.arange(0, KEYS)
        x_CK = load_tile(x_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
        k_CK = load_tile(k_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
        g_CK = load_sums(sums_ptr, i[:, None], at_K[None, :], H * K, K, False)
        is_far_CK = g_CK < -NEAR
        if ERASES:
            x_CK = -x_CK
            if CHANNELS:
                x_CK *= sigmoid(load_tile(beta_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32))
        own_C += tl.sum(tl.where(is_far_CK, x_CK * k_CK, 0.0), 1)
        g_CK += SHIFT
        left_CK = (x_CK * tl.where(is_far_CK, 0.0, tl.exp2(g_CK))).to(dtype)
        right_KC = tl.trans((k_CK * tl.exp2(tl.minimum(-g_CK, NEAR - SHIFT))).to(dtype))
        scores_CC = tl.dot(left_CK, right_KC, scores_CC, input_precision=PRECISION)
        scores_CC = tl.where(i[:, None] >= i[None, :], scores_CC, 0.0)  # other entries may be infinite
        halvings = tl.where(tl.min(tl.min(g_CK, 1), 0) >= SHIFT - NEAR, 0, 6 if C == 64 else 5 if C == 32 else 4)
        half = halvings * 0 + C // 2
        for _ in range(halvings):
            middle = (i | (2 * half - 1)) - half
            middle_CK = load_sums(sums_ptr, middle[:, None], at_K[None, :], H * K, K, False) + SHIFT
            is_late_C1 = ((i & half) != 0)[:, None]
            reads_CK = tl.exp2(tl.where(is_late_C1 & is_far_CK, g_CK - middle_CK, float("-inf")))
            writes_CK = tl.exp2(tl.where(is_late_C1, float("-inf"), middle_CK - g_CK))
            right_KC = tl.trans((k_CK * writes_CK).to(dtype))
            far_CC = tl.dot((x_CK * reads_CK).to(dtype), right_KC, input_precision=PRECISION)
            scores_CC += tl.where(in_same_block(i[:, None], i[None, :], half), far_CC, 0.0)
            half = half >> 1
    return scores_CC + tl.where(i[:, None] == i[None, :], own_C[:, None], 0.0)


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, decay_ptr, beta_ptr, rate_ptr, bias_ptr, ends_ptr, do_ptr, dy_ptr, z_ptr, states_ptr, d_states_ptr,
    d_pairs_ptr, own_ptr, dq_ptr, dk_ptr, ddecay_ptr, dbeta_ptr, drate_ptr, dbias_ptr, sums_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, KEYS: tl.constexpr,
    C: tl.constexpr, CHANNELS: tl.constexpr, LOWER: tl.constexpr, PRECISE: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk and head, KEYS key channels at a time.

    What all channels read stays in shared memory: the values' side and the score gradients. Blocks with sums below
    -NEAR take a separate branch, as in linear_attention's `keys`.
    """
    n_keys: tl.constexpr = (K + KEYS - 1) // KEYS
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    in_K, in_V = b * T * H * K + h * K, b * T * H * V + h * V
    q_ptr += in_K
    k_ptr += in_K
    decay_ptr += in_K
    dq_ptr += in_K
    dk_ptr += in_K
    ddecay_ptr += in_K
    bias_ptr += (b * H + h) * K
    ends_ptr += head * K
    drate_ptr += head
    dbias_ptr += head * K
    sums_ptr += head // H * (C * H * K) + h * K
    states_ptr += head * (K * V)
    d_states_ptr += head * (K * V)
    d_pairs_ptr += head * (2 * C * C)
    rate = tl.load(rate_ptr + b * H + h)
    i, at_V = tl.arange(0, C), tl.arange(0, VP)
    row = start + i
    gate_C, dgate_C = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    if CHANNELS:
        beta_ptr += in_K
        dbeta_ptr += in_K
    else:
        beta_ptr += b * T * H + h
        dbeta_ptr += b * T * H + h
        gate_C = sigmoid(tl.load(beta_ptr + row * H, mask=row < T, other=0.0))
    own_C, before_CC = tl.load(own_ptr + head * C + i), sums_before(C, PRECISE)
    drate_C = tl.zeros([C], tl.float32)
    do_CV = load_tile(do_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, V != VP)
    dy_CV = load_tile(dy_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, V != VP)
    z_CV = load_tile(z_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, V != VP)
    qk_CC, ak_CC = pairs(d_pairs_ptr, C, True), pairs(d_pairs_ptr + C * C, C, True)
    for block in tl.range(0, n_keys, num_stages=STAGES):
        at_K = block * KEYS + tl.arange(0, KEYS)
        end_K = tl.load(ends_ptr + at_K, mask=at_K < K, other=0.0)
        if tl.min(end_K, 0) >= -NEAR:
            dgate_C, drate_C = keys_of(
                q_ptr, k_ptr, decay_ptr, beta_ptr, rate, bias_ptr, end_K, do_CV, dy_CV, z_CV, states_ptr, d_states_ptr,
                d_pairs_ptr, qk_CC, ak_CC, own_C, gate_C, dgate_C, drate_C, before_CC, dq_ptr, dk_ptr, ddecay_ptr,
                dbeta_ptr, dbias_ptr, sums_ptr, row, at_K, T, H, K, V, VP, KEYS, C, CHANNELS, LOWER, PRECISE, False,
                BOUNDED, PRECISION,
            )  # fmt: skip
        else:
            dgate_C, drate_C = keys_of(
                q_ptr, k_ptr, decay_ptr, beta_ptr, rate, bias_ptr, end_K, do_CV, dy_CV, z_CV, states_ptr, d_states_ptr,
                d_pairs_ptr, qk_CC, ak_CC, own_C, gate_C, dgate_C, drate_C, before_CC, dq_ptr, dk_ptr, ddecay_ptr,
                dbeta_ptr, dbias_ptr, sums_ptr, row, at_K, T, H, K, V, VP, KEYS, C, CHANNELS, LOWER, PRECISE, True,
                BOUNDED, PRECISION,
            )  # fmt: skip
    tl.store(drate_ptr, tl.sum(drate_C, 0))
    if not CHANNELS:
        tl.store(dbeta_ptr + row * H, dgate_C * gate_C * (1.0 - gate_C), mask=row < T)


@triton.jit
def keys_of(
    q_ptr, k_ptr, decay_ptr, beta_ptr, rate, bias_ptr, end_K, do_CV, dy_CV, z_CV, states_ptr, d_states_ptr,
    d_pairs_ptr, qk_CC, ak_CC, own_C, gate_C, dgate_C, drate_C, before_CC, dq_ptr, dk_ptr, ddecay_ptr, dbeta_ptr,
    dbias_ptr, sums_ptr, row, at_K,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, KEYS: tl.constexpr,
    C: tl.constexpr, CHANNELS: tl.constexpr, LOWER: tl.constexpr, PRECISE: tl.constexpr, FAR: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute `keys_kernel` for a block of keys, FAR if some sum is below -NEAR.

    Returns dgate and drate plus the parts of this block. Pointers point to the head and, without rows, to the chunk.
    qk and ak are the score gradients, which FAR loads at `d_pairs_ptr`.
    """
    PART: tl.constexpr = K % KEYS != 0
    i, at_V = tl.arange(0, C), tl.arange(0, VP)
    dtype = k_ptr.dtype.element_ty
    s_VK = load_tile(states_ptr, at_V, at_K, 1, V, V, K, V != VP, PART)
    ds_VK = load_tile(d_states_ptr, at_V, at_K, 1, V, V, K, V != VP, PART)
    dq_CK = tl.dot(do_CV, s_VK, input_precision=PRECISION)
    da_CK = tl.dot(dy_CV, s_VK, input_precision=PRECISION)
    dk_CK = tl.dot(z_CV, ds_VK, input_precision=PRECISION)
    overlap_K = tl.sum(s_VK.to(tl.float32) * ds_VK.to(tl.float32), 0)

    log_w_CK = log_decays(decay_ptr, bias_ptr, rate, row, at_K, T, H, K, KEYS, LOWER, PRECISE, BOUNDED)
    g_CK = over_time(before_CC, log_w_CK, 3, PRECISE)
    if FAR:
        store_tile(sums_ptr, i, at_K, H * K, 1, C, K, g_CK)
        tl.debug_barrier()  # other threads read these sums
    q_CK = load_tile(q_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART)
    key_CK = load_tile(k_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
    if CHANNELS:
        gate_CK = sigmoid(load_tile(beta_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32))
        a_CK, k_CK = -gate_CK * key_CK, key_CK
    else:
        gate_CK = gate_C[:, None]
        a_CK, k_CK = -key_CK, gate_CK * key_CK
    if FAR:
        writes_CK, by_CK = from_start(g_CK, False, True), from_start(g_CK, True, True)
    else:
        g_CK += SHIFT
        writes_CK, by_CK = tl.exp2(-g_CK), tl.exp2(g_CK)
    start_q_CK, start_a_CK = (q_CK * by_CK).to(dtype), (a_CK * by_CK).to(dtype)
    start_k_CK = (k_CK * writes_CK).to(dtype)
    if FAR:
        key, qk_ptr, ak_ptr = at_K, d_pairs_ptr, d_pairs_ptr + C * C
        a_CK, k_CK = a_CK.to(dtype), k_CK.to(dtype)
        dq_CK, _ = gradient(
            dq_CK, by_CK, g_CK, end_K, i, qk_ptr, k_CK, start_k_CK, g_CK, i, qk_ptr, k_CK, start_k_CK, g_CK, i,
            sums_ptr, key, H * K, K, C, True, False, True, PRECISION,
        )  # fmt: skip
        da_CK, _ = gradient(
            da_CK, by_CK, g_CK, end_K, i, ak_ptr, k_CK, start_k_CK, g_CK, i, ak_ptr, k_CK, start_k_CK, g_CK, i,
            sums_ptr, key, H * K, K, C, True, False, True, PRECISION,
        )  # fmt: skip
        dk_CK, through_CK = gradient(
            dk_CK, writes_CK, g_CK, end_K, i, qk_ptr, q_CK, start_q_CK, g_CK, i, ak_ptr, a_CK, start_a_CK, g_CK, i,
            sums_ptr, key, H * K, K, C, False, True, True, PRECISION,
        )  # fmt: skip
    else:
        dq_CK = tl.dot(qk_CC, start_k_CK, dq_CK * UNSHIFT, input_precision=PRECISION) * by_CK
        da_CK = tl.dot(ak_CC, start_k_CK, da_CK * UNSHIFT, input_precision=PRECISION) * by_CK
        dk_CK *= tl.exp2(end_K + SHIFT)[None, :]
        through_CK = dk_CK * writes_CK
        dk_CK = tl.dot(tl.trans(qk_CC), start_q_CK, dk_CK, input_precision=PRECISION)
        dk_CK = tl.dot(tl.trans(ak_CC), start_a_CK, dk_CK, input_precision=PRECISION) * writes_CK
    dg_CK = q_CK * dq_CK + a_CK * da_CK - k_CK * dk_CK
    dg_end_K = overlap_K * tl.exp2(end_K) + tl.sum(through_CK * k_CK, 0)
    store_tile(dq_ptr, row, at_K, H * K, 1, T, K, dq_CK + own_C[:, None] * k_CK)
    dk_CK += own_C[:, None] * q_CK
    if CHANNELS:
        store_tile(dbeta_ptr, row, at_K, H * K, 1, T, K, -da_CK * key_CK * gate_CK * (1.0 - gate_CK))
        dk_CK -= gate_CK * da_CK
    else:
        dgate_C += tl.sum(dk_CK * key_CK, 1)
        dk_CK = gate_CK * dk_CK - da_CK
    store_tile(dk_ptr, row, at_K, H * K, 1, T, K, dk_CK)

    dlog_w_CK = over_time(tl.trans(before_CC), dg_CK, 2, PRECISE) + dg_end_K[None, :]
    if BOUNDED:
        dlog_w_CK = tl.where((row < T)[:, None], dlog_w_CK, 0.0)
    dlog_w_CK = tl.where(log_w_CK <= LOWEST, 0.0, dlog_w_CK)  # a log decay below FLOOR has no gradient
    if LOWER == 0:
        by_rate_CK = log_w_CK * (1.0 / rate)
        by_step_CK = rate * tl.exp2(by_rate_CK) - rate  # -rate sigmoid(x), because log w = -rate softplus(x)
        by_rate_CK *= LN2
    else:
        share_CK = log_w_CK * (LN2 / LOWER)
        slope_CK = LOWER * share_CK * (1.0 - share_CK)
        by_rate_CK = slope_CK * load_steps(decay_ptr, bias_ptr, row, at_K, T, H, K, KEYS, BOUNDED) * LN2
        by_step_CK = slope_CK * rate
    dx_CK = dlog_w_CK * by_step_CK
    store_tile(ddecay_ptr, row, at_K, H * K, 1, T, K, dx_CK)
    is_last_CK = (i == C - 1)[:, None] & (at_K < K)[None, :]
    tl.store(dbias_ptr + at_K[None, :] + 0 * i[:, None], over_time(before_CC, dx_CK, 1, PRECISE), mask=is_last_CK)
    return dgate_C, drate_C + tl.sum(dlog_w_CK * by_rate_CK, 1)
