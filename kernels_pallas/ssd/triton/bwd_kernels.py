"""Triton backward kernels of SSD; fwd_kernels.py has the state gradients L and dX.

    kernel        one program per batch entry and           writes
    per_head_bwd  chunk and head                            dx, db, dc, dg, ddt; each head has its own B and C
    scores_bwd    chunk, BLOCK keys of it, HEADS heads      ds; parts of dg and ddt from inside the chunk
    states_bwd    chunk, BLOCK rows of it, HEADS heads      parts of dC (FOR_B: dB), dg and ddt through the states

    operand               shape                      dtype    meaning
    x, dy, dx             [B, T, H, V]               input    inputs, gradients of outputs and inputs
    b, c, db, dc          [B, T, BC, N]              input    as in fwd_kernels.py; gradients of each head
    g, dt                 [B, c, H, Q]               fp32     as in fwd_kernels.py
    states                [B, c, H, N, V]            input    S before each chunk, or L after each chunk (FOR_B)
    ds                    [B, c, H / HEADS, Q, Q]    fp32     gradient of C B^T, keys first, summed over HEADS heads
    sum                   [B, c, H / HEADS, Q, N]    fp32     part of dC or dB, summed over HEADS heads
    as_query              [B, c, blocks, H, Q]       fp32     parts of dg, by key block
    dg                    [B, c, H, Q]               fp32     gradient of g
    as_key, dots, ddt     [B, c, H, Q]               fp32     parts of dg and ddt

`scores_bwd` and `states_bwd` serve a B and C that heads share: BC is 1, and XLA sums over the remaining groups of
heads. With a B and C per head BC is H, nothing is summed over heads, and one kernel keeps the score gradient and all
parts in registers. No atomics are used: two runs give equal bits. Equations and source: `ssd/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.ssd.triton.fwd_kernels import load_row, rows_of
from kernels_pallas.triton.tile_io import load_rows, store_rows


@triton.jit
def load_columns(ptr, row_R, n_N, stride: tl.constexpr, T: tl.constexpr, N: tl.constexpr, BOUNDED: tl.constexpr):
    """Return columns `n_N` of the rows `row_R`; zeros from row T and column N on, when BOUNDED."""
    ptrs = ptr + row_R[:, None] * stride + n_N[None, :]
    if BOUNDED:
        return tl.load(ptrs, mask=(row_R < T)[:, None] & (n_N < N)[None, :], other=0.0)
    return tl.load(ptrs)


@triton.jit
def per_head_bwd_kernel(
    x_ptr, dy_ptr, g_ptr, dt_ptr, b_ptr, c_ptr, states_ptr, d_states_ptr, dx_ptr, db_ptr, dc_ptr, dg_ptr, ddt_ptr,
    T: tl.constexpr, H: tl.constexpr, BC: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr,
    VP: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, BLOCK: tl.constexpr, WITH_DT: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of a chunk for a head with its own B and C.

    Two loops over N read B and C in tiles of BLOCK columns: for the scores, and for the products with the states. dS, W
    and the weights of dX have keys j in rows and queries i in columns. W is the derivative of the log decay between j
    and i > j: its sums over rows and columns use the same fp32 values, so terms cancel exactly in their difference.
    The gradient of the last g includes e^{g_end} <L, S>.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    MASKED: tl.constexpr = BOUNDED or NP != N
    pid = tl.program_id(0)
    h, place = pid % H, (pid // H).to(tl.int64)
    b, chunk = place // n_chunks, place % n_chunks
    head = place * H + h
    i = tl.arange(0, QP)
    row_I = rows_of(chunk, i, Q, T)
    of_x, of_b, of_s = b * T * H * V + h * V, b * T * BC * N + h * N, head * (N * V)
    weights_JI = tl.zeros([QP, QP], tl.float32)
    for start in tl.range(0, NP, BLOCK, num_stages=STAGES):
        n_N = start + tl.arange(0, BLOCK)
        b_JN = load_columns(b_ptr + of_b, row_I, n_N, BC * N, T, N, MASKED)
        c_IN = load_columns(c_ptr + of_b, row_I, n_N, BC * N, T, N, MASKED)
        weights_JI = tl.dot(b_JN, tl.trans(c_IN), weights_JI, input_precision=PRECISION)
    x_JV = load_rows(x_ptr + of_x, row_I, H * V, T, V, VP, BOUNDED)
    dy_IV = load_rows(dy_ptr + of_x, row_I, H * V, T, V, VP, BOUNDED)
    g_I = load_row(g_ptr + head * Q, i, Q)
    is_seen_JI = (i[:, None] <= i[None, :]) & (i < Q)[None, :]
    decay_JI = tl.exp(tl.where(is_seen_JI, g_I[None, :] - g_I[:, None], float("-inf")))
    ds_JI = tl.dot(x_JV, tl.trans(dy_IV), input_precision=PRECISION) * decay_JI
    w_JI = ds_JI * weights_JI
    weights_JI = (weights_JI * decay_JI).to(x_JV.dtype)
    ddt_J = tl.sum(w_JI, 1)
    if WITH_DT:
        dt_J = load_row(dt_ptr + head * Q, i, Q)
        w_JI *= dt_J[:, None]
        ds_JI *= dt_J[:, None]
    w_JI = tl.where(i[:, None] < i[None, :], w_JI, 0.0)
    dg_I = tl.sum(w_JI, 0)
    dg_J = -tl.sum(w_JI, 1)
    ds_JI = ds_JI.to(x_JV.dtype)

    end = tl.load(g_ptr + head * Q + Q - 1)
    to_end_J = tl.exp(tl.where(i < Q, end - g_I, 0.0))
    from_start_I = tl.exp(g_I)
    v_V = tl.arange(0, VP)
    dx_JV = tl.zeros([QP, VP], tl.float32)
    taken_J, read_I = tl.zeros([QP], tl.float32), tl.zeros([QP], tl.float32)
    overlap_N = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, NP, BLOCK, num_stages=STAGES):
        n_N = start + tl.arange(0, BLOCK)
        b_JN = load_columns(b_ptr + of_b, row_I, n_N, BC * N, T, N, MASKED)
        c_IN = load_columns(c_ptr + of_b, row_I, n_N, BC * N, T, N, MASKED)
        l_NV = load_columns(d_states_ptr + of_s, n_N, v_V, V, N, V, NP != N or VP != V)
        s_NV = load_columns(states_ptr + of_s, n_N, v_V, V, N, V, NP != N or VP != V)
        overlap_N += tl.sum(l_NV.to(tl.float32) * s_NV.to(tl.float32), 1)
        dx_JV = tl.dot(b_JN, l_NV, dx_JV, input_precision=PRECISION)
        db_JN = tl.dot(x_JV, tl.trans(l_NV), input_precision=PRECISION) * to_end_J[:, None]
        taken_J += tl.sum(db_JN * b_JN.to(tl.float32), 1)
        if WITH_DT:
            db_JN *= dt_J[:, None]
        db_JN = tl.dot(ds_JI, c_IN, db_JN, input_precision=PRECISION)
        is_BN = (row_I < T)[:, None] & (n_N < N)[None, :]
        at_BN = row_I[:, None] * (BC * N) + n_N[None, :]
        tl.store(db_ptr + of_b + at_BN, db_JN.to(db_ptr.dtype.element_ty), mask=is_BN)
        dc_IN = tl.dot(dy_IV, tl.trans(s_NV), input_precision=PRECISION) * from_start_I[:, None]
        read_I += tl.sum(dc_IN * c_IN.to(tl.float32), 1)
        dc_IN = tl.dot(tl.trans(ds_JI), b_JN, dc_IN, input_precision=PRECISION)
        tl.store(dc_ptr + of_b + at_BN, dc_IN.to(dc_ptr.dtype.element_ty), mask=is_BN)
    dx_JV = tl.dot(weights_JI, dy_IV, dx_JV * to_end_J[:, None], input_precision=PRECISION)
    if WITH_DT:
        dx_JV *= dt_J[:, None]
        tl.store(ddt_ptr + head * Q + i, ddt_J + taken_J, mask=i < Q)
        taken_J *= dt_J
    store_rows(dx_ptr + of_x, row_I, H * V, T, dx_JV, V, VP)
    last = tl.sum(taken_J) + tl.exp(end) * tl.sum(overlap_N)
    dg_I += dg_J + read_I - taken_J + tl.where(i == Q - 1, last, 0.0)
    tl.store(dg_ptr + head * Q + i, dg_I, mask=i < Q)


@triton.jit
def scores_bwd_kernel(
    x_ptr, dy_ptr, g_ptr, dt_ptr, b_ptr, c_ptr, ds_ptr, as_query_ptr, as_key_ptr, ddt_ptr,
    T: tl.constexpr, H: tl.constexpr, BC: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr,
    VP: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    WITH_DT: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dS = (dY X^T) * G * dt for BLOCK keys j of a chunk and all queries i.

    Keys are rows, queries are columns. ds is the sum over HEADS heads. W = dS * (C B^T) is the derivative of the log
    decay between i and j < i: as_query is the block's sum_j W_ij, and as_key is sum_i W_ij. Both use the same fp32
    values, so terms cancel exactly in their difference. ddt is sum_i W_ij / dt_j, including the diagonal.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_blocks: tl.constexpr = (Q + BLOCK - 1) // BLOCK
    n_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    group, block, place = pid % n_groups, pid // n_groups % n_blocks, (pid // (n_groups * n_blocks)).to(tl.int64)
    b, chunk = place // n_chunks, place % n_chunks
    j, i = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, QP)
    row_J, row_I = rows_of(chunk, j, Q, T), rows_of(chunk, i, Q, T)
    b_JN = load_rows(b_ptr + b * T * N, row_J, N, T, N, NP, BOUNDED)
    c_IN = load_rows(c_ptr + b * T * N, row_I, N, T, N, NP, BOUNDED)
    scores_JI = tl.dot(b_JN, tl.trans(c_IN), input_precision=PRECISION)
    is_seen_JI = (j[:, None] <= i[None, :]) & (i < Q)[None, :]
    is_past_JI = j[:, None] < i[None, :]
    ds_JI = tl.zeros([BLOCK, QP], tl.float32)
    for h in tl.range(group * HEADS, tl.minimum(group * HEADS + HEADS, H), num_stages=STAGES):
        head = place * H + h
        x_JV = load_rows(x_ptr + b * T * H * V + h * V, row_J, H * V, T, V, VP, BOUNDED)
        dy_IV = load_rows(dy_ptr + b * T * H * V + h * V, row_I, H * V, T, V, VP, BOUNDED)
        g_J, g_I = load_row(g_ptr + head * Q, j, Q), load_row(g_ptr + head * Q, i, Q)
        here_JI = tl.dot(x_JV, tl.trans(dy_IV), input_precision=PRECISION)
        here_JI *= tl.exp(tl.where(is_seen_JI, g_I[None, :] - g_J[:, None], float("-inf")))
        if WITH_DT:
            tl.store(ddt_ptr + head * Q + j, tl.sum(here_JI * scores_JI, 1), mask=j < Q)
            here_JI *= load_row(dt_ptr + head * Q, j, Q)[:, None]
        ds_JI += here_JI
        w_JI = tl.where(is_past_JI, here_JI * scores_JI, 0.0)
        tl.store(as_key_ptr + head * Q + j, tl.sum(w_JI, 1), mask=j < Q)
        tl.store(as_query_ptr + ((place * n_blocks + block) * H + h) * Q + i, tl.sum(w_JI, 0), mask=i < Q)
    at_JI = ((place * n_groups + group) * Q + j[:, None]) * Q + i[None, :]
    tl.store(ds_ptr + at_JI, ds_JI.to(ds_ptr.dtype.element_ty), mask=(j < Q)[:, None] & (i < Q)[None, :])


@triton.jit
def states_bwd_kernel(
    v_ptr, g_ptr, dt_ptr, u_ptr, states_ptr, sum_ptr, dots_ptr, ddt_ptr,
    T: tl.constexpr, H: tl.constexpr, BC: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr,
    VP: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    WITH_DT: tl.constexpr, BOUNDED: tl.constexpr, FOR_B: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of sum_h w_h * (V_h S_h^T), and each term's dots with U.

    For dC: v is dy, states are those at the chunk starts, u is C, w = e^g. For dB (FOR_B): v is x, states are the
    gradients after the chunks, u is B, w = e^{g_end - g} dt. dots is the derivative of log w; with FOR_B, ddt is dots /
    dt.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_blocks: tl.constexpr = (Q + BLOCK - 1) // BLOCK
    n_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    group, block, place = pid % n_groups, pid // n_groups % n_blocks, (pid // (n_groups * n_blocks)).to(tl.int64)
    b, chunk = place // n_chunks, place % n_chunks
    i = block * BLOCK + tl.arange(0, BLOCK)
    row_I = rows_of(chunk, i, Q, T)
    u_IN = load_rows(u_ptr + b * T * N, row_I, N, T, N, NP, BOUNDED)
    sum_IN = tl.zeros([BLOCK, NP], tl.float32)
    for h in tl.range(group * HEADS, tl.minimum(group * HEADS + HEADS, H), num_stages=STAGES):
        head = place * H + h
        v_IV = load_rows(v_ptr + b * T * H * V + h * V, row_I, H * V, T, V, VP, BOUNDED)
        s_NV = load_rows(states_ptr + head * (N * V), tl.arange(0, NP), V, N, V, VP, N != NP)
        w_I = load_row(g_ptr + head * Q, i, Q)
        if FOR_B:
            w_I = tl.where(i < Q, tl.load(g_ptr + head * Q + Q - 1) - w_I, 0.0)
        w_I = tl.exp(w_I)
        term_IN = tl.dot(v_IV, tl.trans(s_NV), input_precision=PRECISION)
        dots_I = tl.sum(term_IN * u_IN.to(tl.float32), 1) * w_I
        if FOR_B and WITH_DT:
            dt_I = load_row(dt_ptr + head * Q, i, Q)
            tl.store(ddt_ptr + head * Q + i, dots_I, mask=i < Q)
            dots_I *= dt_I
            w_I *= dt_I
        tl.store(dots_ptr + head * Q + i, dots_I, mask=i < Q)
        sum_IN += term_IN * w_I[:, None]
    store_rows(sum_ptr + (place * n_groups + group) * (Q * N), i, N, Q, sum_IN, N, NP)
