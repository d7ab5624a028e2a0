"""Triton backward kernels of the delta rule: state, then input gradients.

    kernel   one program per batch entry and            writes
    dstate   time segment, head, BLOCK columns of L     dstates, dy, dinitial; goes back over the chunks
    rows     chunk and head                             dq, dv, dbeta, row parts of dk and dg
    columns  chunk and head                             dk and dg: row parts plus column parts

    operand                shape             dtype      meaning
    q, k, dq, dk           [B, T, H, K]      input      queries, keys and their gradients
    v, w, do, dy, dv       [B, T, H, V]      input      values, W, output gradient, dY, value gradient
    x, m                   [B, T, H, C]      input      X * G and M = P (X * G) of each chunk
    beta, g, dbeta, dg     [B, c, H, C]      fp32       step sizes, summed log decays and their gradients
    states, dstates        [B, c, H, K, V]   input      states before, and state gradients L after, each chunk
    dlast, dinitial        [B, s, H, K, V]   fp32       gradients of the states after and before each segment

Rows and columns are two kernels because their accumulators together exceed the registers. In dg, row sums minus column
sums, the contributions of many pairs of positions cancel. Both kernels therefore round the same C x C products before
they multiply, and the cancellation holds in every dtype. No atomics are used: two runs give equal bits. Equations and
source: `delta_rule/api.py`, arXiv 2412.06464.
"""

import triton
import triton.language as tl

from kernels_pallas.delta_rule.triton.fwd_kernels import decays
from kernels_pallas.triton.tile_io import (
    LOG2_E,
    load_rows,
    load_tile,
    place_of,
    store_rows,
    store_tile,
    store_transposed,
)


@triton.jit
def dstate_kernel(
    q_ptr, k_ptr, x_ptr, m_ptr, beta_ptr, g_ptr, do_ptr, dlast_ptr, dstates_ptr, dy_ptr, dinitial_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ENDS: tl.constexpr, HAS_GATE: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass BLOCK columns of the state gradient L back through SEGMENT chunks.

    L^T <- e^{g_C} L^T + (e^g dO)^T Q - (e^g beta dY)^T K, and dY^T = dO^T M + (e^{g_C - g} K L)^T (X * G). Transposed
    tiles, the places of loads and ENDS as in `state_kernel`; with ENDS only `dinitial` is written.
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
        ds_VK = tl.where(at_V[:, None] - V == at_K[None, :], 1.0, 0.0)
    else:
        ds_VK = load_tile(dlast_ptr + state * (K * V), at_V, at_K, 1, V, V, K, PART, K != KP)
    for step in tl.range(0, n_steps, num_stages=STAGES):
        chunk = first + n_steps - 1 - step
        head, start = (b * n_chunks + chunk) * H + h, chunk * C
        token = (b * T + start) * H + h
        ds_low_VK = ds_VK.to(dtype)
        if not ENDS:
            store_transposed(dstates_ptr + head * (K * V), column, 0, V, V, K, BLOCK, KP, PART, K != KP, ds_low_VK)
        k_CK = load_rows(k_ptr + token * K, i, H * K, T - start, K, KP, BOUNDED)
        dw_VC = tl.dot(ds_low_VK, tl.trans(k_CK), input_precision=PRECISION)
        if HAS_GATE:
            g_C, end = tl.load(g_ptr + head * C + i), tl.load(g_ptr + head * C + C - 1)
            dw_VC *= tl.exp2((end - g_C) * LOG2_E)[None, :]
            ds_VK *= tl.exp2(end * LOG2_E)
        m_CC = load_rows(m_ptr + token * C, i, H * C, T - start, C, C, BOUNDED)
        do_VC = load_tile(do_ptr + token * V, at_V, i, 1, H * V, V, T - start, PART, BOUNDED)
        dy_VC = tl.dot(do_VC, m_CC, input_precision=PRECISION)
        x_CC = load_rows(x_ptr + token * C, i, H * C, T - start, C, C, BOUNDED)
        dy_VC = tl.dot(dw_VC.to(dtype), x_CC, dy_VC, input_precision=PRECISION)
        if not ENDS:
            store_transposed(dy_ptr + token * V, column, 0, H * V, V, T - start, BLOCK, C, PART, BOUNDED, dy_VC)
        dseen_C = -tl.load(beta_ptr + head * C + i)
        if HAS_GATE:
            grow_C = tl.exp2(g_C * LOG2_E)
            dseen_C *= grow_C
            do_VC = (do_VC.to(tl.float32) * grow_C[None, :]).to(dtype)
        dseen_VC = dseen_C[None, :] * dy_VC
        ds_VK = tl.dot(dseen_VC.to(dtype), k_CK, ds_VK, input_precision=PRECISION)
        q_CK = load_rows(q_ptr + token * K, i, H * K, T - start, K, KP, BOUNDED)
        ds_VK = tl.dot(do_VC, q_CK, ds_VK, input_precision=PRECISION)
    store_tile(dinitial_ptr + state * (K * COLUMNS), at_V, at_K, 1, COLUMNS, COLUMNS, K, ds_VK)


@triton.jit
def rows_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, g_ptr, states_ptr, do_ptr, dy_ptr, dq_ptr, dk_ptr, dv_ptr, dbeta_ptr, dg_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients that sum over the columns j of a chunk's products.

    Writes dq, dv, dbeta and the row parts of dk and (with HAS_GATE) dg.
    """
    n_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    PART: tl.constexpr = V % BLOCK != 0
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i, at_K = tl.arange(0, C), tl.arange(0, KP)
    row = start + i
    in_K, in_V = b * T * H * K + h * K, b * T * H * V + h * V
    dtype = k_ptr.dtype.element_ty
    beta_C = tl.load(beta_ptr + head * C + i)
    z_CC, m_CC = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    dq_CK, dk_CK = tl.zeros([C, KP], tl.float32), tl.zeros([C, KP], tl.float32)
    dbeta_C = tl.zeros([C], tl.float32)
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_V = block * BLOCK + tl.arange(0, BLOCK)
        s_KV = load_tile(states_ptr + head * (K * V), at_K, at_V, V, 1, K, V, K != KP, PART)
        w_CV = load_tile(w_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        do_CV = load_tile(do_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        dy_CV = load_tile(dy_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        z_CC = tl.dot(do_CV, tl.trans(w_CV), z_CC, input_precision=PRECISION)
        m_CC = tl.dot(dy_CV, tl.trans(w_CV), m_CC, input_precision=PRECISION)
        dq_CK = tl.dot(do_CV, tl.trans(s_KV), dq_CK, input_precision=PRECISION)
        dk_CK = tl.dot(dy_CV, tl.trans(s_KV), dk_CK, input_precision=PRECISION)
        dy_CV = dy_CV.to(tl.float32)
        store_tile(dv_ptr + in_V, row, at_V, H * V, 1, T, V, beta_C[:, None] * dy_CV)
        v_CV = load_tile(v_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        dbeta_C += tl.sum(dy_CV * v_CV.to(tl.float32), 1)
    k_CK = load_rows(k_ptr + in_K, row, H * K, T, K, KP, BOUNDED)
    g_C = beta_C
    if HAS_GATE:
        g_C = tl.load(g_ptr + head * C + i)
    grow_C = tl.exp(g_C)
    later, earlier = i[:, None], i[None, :]
    decays_CC = decays(later, earlier, g_C[:, None], g_C[None, :], HAS_GATE)
    z_CC *= decays_CC
    m_CC = tl.where(later > earlier, -m_CC * decays_CC, 0.0)
    if HAS_GATE:
        dq_CK *= grow_C[:, None]
        dk_CK *= grow_C[:, None]
    k_wide_CK = k_CK.to(tl.float32)
    # First the path through R = V - e^g K S, then the rows of A. k . k is computed again: M must stay unrounded here.
    dbeta_C -= tl.sum(k_wide_CK * dk_CK, 1)
    dbeta_C += tl.sum(m_CC * tl.dot(k_CK, tl.trans(k_CK), input_precision=PRECISION), 1)
    tl.store(dbeta_ptr + head * C + i, dbeta_C)
    dq_CK = tl.dot(z_CC.to(dtype), k_CK, dq_CK, input_precision=PRECISION)
    dk_CK = tl.dot((beta_C[:, None] * m_CC).to(dtype), k_CK, -beta_C[:, None] * dk_CK, input_precision=PRECISION)
    store_rows(dq_ptr + in_K, row, H * K, T, dq_CK, K, KP)
    store_rows(dk_ptr + in_K, row, H * K, T, dk_CK, K, KP)
    if HAS_GATE:
        q_CK = load_rows(q_ptr + in_K, row, H * K, T, K, KP, BOUNDED)
        tl.store(dg_ptr + head * C + i, tl.sum(q_CK.to(tl.float32) * dq_CK + k_wide_CK * dk_CK, 1))


@triton.jit
def columns_kernel(
    q_ptr, k_ptr, w_ptr, beta_ptr, g_ptr, states_ptr, do_ptr, dy_ptr, dstates_ptr, dk_rows_ptr, dg_rows_ptr,
    dk_ptr, dg_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients that sum over the rows i of a chunk's products.

    Adds them to the row parts and writes the complete dk and, with HAS_GATE, dg.
    """
    n_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    PART: tl.constexpr = V % BLOCK != 0
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i, at_K = tl.arange(0, C), tl.arange(0, KP)
    row = start + i
    in_K, in_V = b * T * H * K + h * K, b * T * H * V + h * V
    zt_CC, mt_CC = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    dk_CK = tl.zeros([C, KP], tl.float32)
    overlap_K = tl.zeros([KP], tl.float32)
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_V = block * BLOCK + tl.arange(0, BLOCK)
        w_CV = load_tile(w_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        do_CV = load_tile(do_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        dy_CV = load_tile(dy_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        ds_KV = load_tile(dstates_ptr + head * (K * V), at_K, at_V, V, 1, K, V, K != KP, PART)
        zt_CC = tl.dot(w_CV, tl.trans(do_CV), zt_CC, input_precision=PRECISION)
        mt_CC = tl.dot(w_CV, tl.trans(dy_CV), mt_CC, input_precision=PRECISION)
        dk_CK = tl.dot(w_CV, tl.trans(ds_KV), dk_CK, input_precision=PRECISION)
        if HAS_GATE:
            s_KV = load_tile(states_ptr + head * (K * V), at_K, at_V, V, 1, K, V, K != KP, PART)
            overlap_K += tl.sum(s_KV.to(tl.float32) * ds_KV.to(tl.float32), 1)
    q_CK = load_rows(q_ptr + in_K, row, H * K, T, K, KP, BOUNDED)
    k_CK = load_rows(k_ptr + in_K, row, H * K, T, K, KP, BOUNDED)
    k_wide_CK = k_CK.to(tl.float32)
    beta_C = tl.load(beta_ptr + head * C + i)
    g_C = beta_C
    end = 0.0
    if HAS_GATE:
        g_C, end = tl.load(g_ptr + head * C + i), tl.load(g_ptr + head * C + C - 1)
        dk_CK *= tl.exp(end - g_C)[:, None]
        end = tl.exp(end) * tl.sum(overlap_K, 0) + tl.sum(tl.sum(k_wide_CK * dk_CK, 1), 0)
    later, earlier = i[None, :], i[:, None]
    decays_CC = decays(later, earlier, g_C[None, :], g_C[:, None], HAS_GATE)
    zt_CC *= decays_CC
    mt_CC = tl.where(later > earlier, beta_C[None, :] * (-mt_CC * decays_CC), 0.0)
    dk_CK = tl.dot(zt_CC.to(k_CK.dtype), q_CK, dk_CK, input_precision=PRECISION)
    dk_CK = tl.dot(mt_CC.to(k_CK.dtype), k_CK, dk_CK, input_precision=PRECISION)
    if HAS_GATE:
        dg_C = tl.load(dg_rows_ptr + head * C + i) - tl.sum(k_wide_CK * dk_CK, 1)
        tl.store(dg_ptr + head * C + i, dg_C + tl.where(i == C - 1, end, 0.0))
    dk_CK += load_rows(dk_rows_ptr + in_K, row, H * K, T, K, KP, BOUNDED).to(tl.float32)
    store_rows(dk_ptr + in_K, row, H * K, T, dk_CK, K, KP)
