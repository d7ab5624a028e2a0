"""Triton forward kernels of the delta rule: inverses and scores of all chunks, then states and outputs.

    kernel   one program per batch entry and             writes
    solve    chunk and head                              x [B, T, H, C], X * G of each chunk
    mix      chunk and head                              m [B, T, H, C], M of each chunk
    state    time segment, head, BLOCK columns of S      states [B, c, H, K, V] at the chunk starts, w, o, last
    out      chunk and head                              o [B, T, H, V], if `state` has few programs

    operand      shape             dtype      meaning
    q, k         [B, T, H, K]      input      queries, keys
    v, w, o      [B, T, H, V]      input      values, W, outputs
    x, m         [B, T, H, C]      input      row t: the rows of X * G and M at position t
    beta, g      [B, c, H, C]      fp32       step sizes (0 after T), log decays summed from the chunk start
    states       [B, c, H, K, V]   input      states before each chunk
    start, last  [B, s, H, K, V]   fp32       states before and after each of s time segments

    X = (I + stril(beta K K^T))^{-1},   G_ij = e^{g_i - g_j}, j <= i,   M = (tril(Q K^T) * G) (X * G)
    Y = beta (V - e^g K S),   W = (X * G) Y,   S <- e^{g_C} S + K^T (e^{g_C - g} W),   O = e^g Q S + M Y

Only `state` is sequential over time; the other kernels run all chunks in parallel. `state` also computes the outputs
(OUT), from the S and Y in its registers, and then writes states and W only for a backward pass (STATES, KEEP). With
few programs, the time of one program counts, and `out` computes the outputs from the written states (scan.py chooses).

A tile holds all C positions of a chunk on one axis, all keys (padded to KP) and BLOCK value columns at a time. `state`
and the pass back over time (`dstate`) transpose their tiles: rows are value columns, as in S^T [V, K] and Y^T [V, C].
Every computed tile is then a left operand of the next product, which Hopper reads from registers. The right operands
are loaded tiles, in shared memory.

HAS_GATE selects Gated DeltaNet; DeltaNet reads no g and computes no decay. Exponents are masked differences of g,
because unmasked ones overflow above the diagonal. Sums are float32 and products use the input dtype. Positions after T
read as zero and correct nothing. No computed tile is transposed for a product, because compilers got that wrong on
Hopper: the kernels compute the transposed tile from loaded tiles instead. Equations and source: `delta_rule/api.py`,
arXiv 2412.06464.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import (
    LOG2_E,
    load_rows,
    load_tile,
    load_transposed,
    place_of,
    store_tile,
    store_transposed,
)
from kernels_pallas.triton.triangular import SOLVE, product, store_row, third_and_fourth_rows, unit_inverses


@triton.jit
def decays(later, earlier, g_later, g_earlier, HAS_GATE: tl.constexpr):
    """Return G: e^{g_later - g_earlier} where later >= earlier, else 0.

    The later positions may index either the rows or the columns.
    """
    is_seen = later >= earlier
    if HAS_GATE:
        return tl.exp(tl.where(is_seen, g_later - g_earlier, float("-inf")))
    return tl.where(is_seen, 1.0, 0.0)


@triton.jit
def corrected(beta_R, k_RK, earlier_RK, PRECISION: tl.constexpr):
    """Return a block of A = beta K K^T: rows `k_RK`, columns `earlier_RK`."""
    return beta_R[:, None] * tl.dot(k_RK, tl.trans(earlier_RK), input_precision=PRECISION)


@triton.jit
def decays_of(g_ptr, r, c, HAS_GATE: tl.constexpr):
    """Return block (r, c) of G, of SOLVE rows and columns. `g_ptr` points to the chunk's g."""
    later, earlier = tl.arange(0, SOLVE) + r * SOLVE, tl.arange(0, SOLVE) + c * SOLVE
    g_later, g_earlier = later, earlier
    if HAS_GATE:
        g_later, g_earlier = tl.load(g_ptr + later), tl.load(g_ptr + earlier)
    return decays(later[:, None], earlier[None, :], g_later[:, None], g_earlier[None, :], HAS_GATE)


@triton.jit
def store_decayed_row(
    out, row, stride: tl.constexpr, T: tl.constexpr, C: tl.constexpr, R: tl.constexpr, g_ptr, x0_RR, x1_RR, x2_RR,
    x3_RR, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Write block row R of X * G. The blocks after the diagonal are not read."""
    if HAS_GATE:
        x0_RR *= decays_of(g_ptr, R, 0, HAS_GATE)
        if R > 0:
            x1_RR *= decays_of(g_ptr, R, 1, HAS_GATE)
        if R > 1:
            x2_RR *= decays_of(g_ptr, R, 2, HAS_GATE)
        if R > 2:
            x3_RR *= decays_of(g_ptr, R, 3, HAS_GATE)
    store_row(out, row, stride, T, C, R, x0_RR, x1_RR, x2_RR, x3_RR)


@triton.jit
def solve_kernel(
    k_ptr, beta_ptr, g_ptr, x_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, HAS_GATE: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute X * G, with X = (I + A)^{-1} and A = stril(beta K K^T), for one chunk of one head.

    Method: `triton/triangular.py`, in blocks of SOLVE rows.
    """
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i = tl.arange(0, SOLVE)
    in_k, in_beta, in_g = k_ptr + b * T * H * K + h * K, beta_ptr + head * C, g_ptr + head * C
    out = x_ptr + (b * T * H + h) * C
    later, earlier = i[:, None], i[None, :]
    row = start + i
    k0_RK, beta0_R = load_rows(in_k, row, H * K, T, K, KP, BOUNDED), tl.load(in_beta + i)
    a00_RR = tl.where(later > earlier, corrected(beta0_R, k0_RK, k0_RK, PRECISION), 0.0)
    a11_RR, a22_RR, a33_RR = a00_RR, a00_RR, a00_RR
    if C > SOLVE:
        k1_RK, beta1_R = load_rows(in_k, row + SOLVE, H * K, T, K, KP, BOUNDED), tl.load(in_beta + i + SOLVE)
        a11_RR = tl.where(later > earlier, corrected(beta1_R, k1_RK, k1_RK, PRECISION), 0.0)
        a10_RR = corrected(beta1_R, k1_RK, k0_RK, PRECISION)
    if C > 2 * SOLVE:
        k2_RK = load_rows(in_k, row + 2 * SOLVE, H * K, T, K, KP, BOUNDED)
        k3_RK = load_rows(in_k, row + 3 * SOLVE, H * K, T, K, KP, BOUNDED)
        beta2_R, beta3_R = tl.load(in_beta + i + 2 * SOLVE), tl.load(in_beta + i + 3 * SOLVE)
        a22_RR = tl.where(later > earlier, corrected(beta2_R, k2_RK, k2_RK, PRECISION), 0.0)
        a33_RR = tl.where(later > earlier, corrected(beta3_R, k3_RK, k3_RK, PRECISION), 0.0)
        a20_RR, a21_RR = corrected(beta2_R, k2_RK, k0_RK, PRECISION), corrected(beta2_R, k2_RK, k1_RK, PRECISION)
        a30_RR, a31_RR = corrected(beta3_R, k3_RK, k0_RK, PRECISION), corrected(beta3_R, k3_RK, k1_RK, PRECISION)
        a32_RR = corrected(beta3_R, k3_RK, k2_RK, PRECISION)
    x00_RR, x11_RR, x22_RR, x33_RR = unit_inverses(a00_RR, a11_RR, a22_RR, a33_RR, C // SOLVE)
    store_decayed_row(out, row, H * C, T, C, 0, in_g, x00_RR, x00_RR, x00_RR, x00_RR, HAS_GATE)
    if C > SOLVE:
        x10_RR = -product(x11_RR, product(a10_RR, x00_RR))
        store_decayed_row(out, row, H * C, T, C, 1, in_g, x10_RR, x11_RR, x11_RR, x11_RR, HAS_GATE)
    if C > 2 * SOLVE:
        x20_RR, x21_RR, x30_RR, x31_RR, x32_RR = third_and_fourth_rows(
            x00_RR, x10_RR, x11_RR, x22_RR, x33_RR, a20_RR, a21_RR, a30_RR, a31_RR, a32_RR
        )
        store_decayed_row(out, row, H * C, T, C, 2, in_g, x20_RR, x21_RR, x22_RR, x22_RR, HAS_GATE)
        store_decayed_row(out, row, H * C, T, C, 3, in_g, x30_RR, x31_RR, x32_RR, x33_RR, HAS_GATE)


@triton.jit
def mix_kernel(
    q_ptr, k_ptr, x_ptr, g_ptr, m_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, HAS_GATE: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute M = P (X * G), with P = tril(Q K^T) * G, for one chunk of one head."""
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i = tl.arange(0, C)
    row, in_K, in_C = start + i, b * T * H * K + h * K, (b * T * H + h) * C
    q_CK = load_rows(q_ptr + in_K, row, H * K, T, K, KP, BOUNDED)
    k_CK = load_rows(k_ptr + in_K, row, H * K, T, K, KP, BOUNDED)
    x_CC = load_rows(x_ptr + in_C, row, H * C, T, C, C, BOUNDED)
    g_C = i
    if HAS_GATE:
        g_C = tl.load(g_ptr + head * C + i)
    p_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION)
    p_CC *= decays(i[:, None], i[None, :], g_C[:, None], g_C[None, :], HAS_GATE)
    m_CC = tl.dot(p_CC.to(x_CC.dtype), x_CC, input_precision=PRECISION)
    store_tile(m_ptr + in_C, row, i, H * C, 1, T, C, m_CC)


@triton.jit
def corrected_values(k_CK, v_CV, beta_C, grow_C, s_KV, HAS_GATE: tl.constexpr, PRECISION: tl.constexpr):
    """Return Y = beta (V - e^g K S) [C, V] in the input dtype.

    `grow_C` is e^g, and `s_KV` is the state before the chunk in the input dtype.
    """
    seen_CV = tl.dot(k_CK, s_KV, input_precision=PRECISION)
    if HAS_GATE:
        seen_CV *= grow_C[:, None]
    return (beta_C[:, None] * (v_CV.to(tl.float32) - seen_CV)).to(k_CK.dtype)


@triton.jit
def outputs(q_CK, m_CC, y_CV, grow_C, s_KV, HAS_GATE: tl.constexpr, PRECISION: tl.constexpr):
    """Return O = e^g Q S + M Y [C, V] in float32."""
    o_CV = tl.dot(q_CK, s_KV, input_precision=PRECISION)
    if HAS_GATE:
        o_CV *= grow_C[:, None]
    return tl.dot(m_CC, y_CV, o_CV, input_precision=PRECISION)


@triton.jit
def state_kernel(
    q_ptr, k_ptr, v_ptr, x_ptr, m_ptr, beta_ptr, g_ptr, start_ptr, states_ptr, w_ptr, o_ptr, last_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ENDS: tl.constexpr, STATES: tl.constexpr, KEEP: tl.constexpr,
    OUT: tl.constexpr, HAS_GATE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass BLOCK columns of a head's state through SEGMENT chunks.

    S^T <- e^{g_C} S^T + (e^{g_C - g} W)^T K, with W^T = Y^T (X * G)^T and O^T = e^g S^T Q^T + Y^T M^T. STATES writes
    the states, KEEP W and OUT o. With ENDS the kernel writes only `last` [B, s, H, K, V + K]: the segment's end state
    from S = 0, followed by K columns that start from the identity (see state_scan/triton/segments.py).

    The chunk's first load follows the writes of the states, so that its copy to shared memory continues meanwhile.
    """
    n_chunks: tl.constexpr = (T + C - 1) // C
    n_segments: tl.constexpr = (n_chunks + SEGMENT - 1) // SEGMENT
    COLUMNS: tl.constexpr = V + K if ENDS else V
    n_blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    PART: tl.constexpr = ENDS or V % BLOCK != 0
    pid = tl.program_id(0)
    block, h, bs = pid % n_blocks, pid // n_blocks % H, pid // (n_blocks * H)
    b, first, n_steps = (bs // n_segments).to(tl.int64), bs % n_segments * SEGMENT, SEGMENT
    if n_chunks % SEGMENT != 0:
        n_steps = tl.minimum(SEGMENT, n_chunks - first)
    column, i, at_K = block * BLOCK, tl.arange(0, C), tl.arange(0, KP)
    at_V = column + tl.arange(0, BLOCK)
    dtype = k_ptr.dtype.element_ty
    state = bs.to(tl.int64) * H + h
    if ENDS:
        s_VK = tl.where(at_V[:, None] - V == at_K[None, :], 1.0, 0.0)
    else:
        s_VK = load_tile(start_ptr + state * (K * V), at_V, at_K, 1, V, V, K, PART, K != KP)
    for step in tl.range(0, n_steps, num_stages=STAGES):
        chunk = first + step
        head, start = (b * n_chunks + chunk) * H + h, chunk * C
        token = (b * T + start) * H + h
        s_low_VK = s_VK.to(dtype)
        if STATES:
            store_transposed(states_ptr + head * (K * V), column, 0, V, V, K, BLOCK, KP, PART, K != KP, s_low_VK)
        k_CK = load_rows(k_ptr + token * K, i, H * K, T - start, K, KP, BOUNDED)
        y_VC = tl.dot(s_low_VK, tl.trans(k_CK), input_precision=PRECISION)
        if OUT:
            q_CK = load_rows(q_ptr + token * K, i, H * K, T - start, K, KP, BOUNDED)
            o_VC = tl.dot(s_low_VK, tl.trans(q_CK), input_precision=PRECISION)
        if HAS_GATE:
            g_C, end = tl.load(g_ptr + head * C + i), tl.load(g_ptr + head * C + C - 1)
            grow_C = tl.exp2(g_C * LOG2_E)
            y_VC *= grow_C[None, :]
            if OUT:
                o_VC *= grow_C[None, :]
        v_VC = load_transposed(v_ptr + token * V, column, 0, H * V, V, T - start, BLOCK, C, PART, BOUNDED)
        y_VC = tl.load(beta_ptr + head * C + i)[None, :] * (v_VC.to(tl.float32) - y_VC)
        y_VC = y_VC.to(dtype)
        x_CC = load_rows(x_ptr + token * C, i, H * C, T - start, C, C, BOUNDED)
        w_VC = tl.dot(y_VC, tl.trans(x_CC), input_precision=PRECISION)
        if KEEP:
            store_transposed(w_ptr + token * V, column, 0, H * V, V, T - start, BLOCK, C, PART, BOUNDED, w_VC)
        if OUT:
            m_CC = load_rows(m_ptr + token * C, i, H * C, T - start, C, C, BOUNDED)
            o_VC = tl.dot(y_VC, tl.trans(m_CC), o_VC, input_precision=PRECISION)
            store_transposed(o_ptr + token * V, column, 0, H * V, V, T - start, BLOCK, C, PART, BOUNDED, o_VC)
        if HAS_GATE:
            w_VC *= tl.exp2((end - g_C) * LOG2_E)[None, :]
            s_VK *= tl.exp2(end * LOG2_E)
        s_VK = tl.dot(w_VC.to(dtype), k_CK, s_VK, input_precision=PRECISION)
    store_tile(last_ptr + state * (K * COLUMNS), at_V, at_K, 1, COLUMNS, COLUMNS, K, s_VK)


@triton.jit
def out_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, beta_ptr, g_ptr, states_ptr, o_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute O = e^g Q S + M Y for one chunk of one head, from the written states."""
    n_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    PART: tl.constexpr = V % BLOCK != 0
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i, at_K = tl.arange(0, C), tl.arange(0, KP)
    row = start + i
    q_CK = load_rows(q_ptr + b * T * H * K + h * K, row, H * K, T, K, KP, BOUNDED)
    k_CK = load_rows(k_ptr + b * T * H * K + h * K, row, H * K, T, K, KP, BOUNDED)
    m_CC = load_rows(m_ptr + b * T * H * C + h * C, row, H * C, T, C, C, BOUNDED)
    beta_C = tl.load(beta_ptr + head * C + i)
    grow_C = beta_C
    if HAS_GATE:
        grow_C = tl.exp(tl.load(g_ptr + head * C + i))
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_V = block * BLOCK + tl.arange(0, BLOCK)
        s_KV = load_tile(states_ptr + head * (K * V), at_K, at_V, V, 1, K, V, K != KP, PART)
        v_CV = load_tile(v_ptr + b * T * H * V + h * V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        y_CV = corrected_values(k_CK, v_CV, beta_C, grow_C, s_KV, HAS_GATE, PRECISION)
        o_CV = outputs(q_CK, m_CC, y_CV, grow_C, s_KV, HAS_GATE, PRECISION)
        store_tile(o_ptr + b * T * H * V + h * V, row, at_V, H * V, 1, T, V, o_CV)
