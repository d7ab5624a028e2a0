"""Triton backward kernels of SSD; fwd_kernels.py has dX and the state gradients.

    kernel        one program per batch entry and           writes
    scores_bwd    chunk, BLOCK keys of it, HEADS heads      ds; parts of dg and ddt from inside the chunk
    states_bwd    chunk, BLOCK rows of it, HEADS heads      parts of dC (FOR_B: dB), dg and ddt through the states

    operand               shape                      dtype    meaning
    x, dy                 [B, T, H, V]               input    inputs and output gradient
    b, c                  [B, T, BC, N]              input    as in fwd_kernels.py
    g, dt                 [B, c, H, Q]               fp32     as in fwd_kernels.py
    states                [B, c, H, N, V]            input    S before each chunk, or L after each chunk (FOR_B)
    ds                    [B, c, H / HEADS, Q, Q]    fp32     gradient of C B^T, keys first, summed over HEADS heads
    sum                   [B, c, H / HEADS, Q, N]    fp32     part of dC or dB, summed over HEADS heads
    as_query              [B, c, blocks, H, Q]       fp32     parts of dg, by key block
    as_key, dots, ddt     [B, c, H, Q]               fp32     parts of dg and ddt

XLA sums over the remaining groups of heads. No atomics are used: two runs give equal bits. If each head has its own B
and C, BC is H, HEADS is 1, and nothing is summed over heads. Equations and source: `ssd/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.ssd.triton.fwd_kernels import load_row, rows_of
from kernels_pallas.triton.tile_io import load_rows, store_rows


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
    of_head = b * T * BC * N + group % BC * N
    b_JN = load_rows(b_ptr + of_head, row_J, BC * N, T, N, NP, BOUNDED)
    c_IN = load_rows(c_ptr + of_head, row_I, BC * N, T, N, NP, BOUNDED)
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
    u_IN = load_rows(u_ptr + b * T * BC * N + group % BC * N, row_I, BC * N, T, N, NP, BOUNDED)
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
