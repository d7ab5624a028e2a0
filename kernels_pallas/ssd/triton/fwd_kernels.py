"""Triton kernels of SSD (Mamba-2): states, outputs; with REVERSE, L and dX.

    kernel          one program per batch entry and             writes; with REVERSE
    state_passing   head, BLOCK rows of S                       states, last; state gradients L
    chunk_scan      chunk, BLOCK rows of it, HEADS heads        y; dx

    operand          shape              dtype    meaning
    x, y, dy, dx     [B, T, H, V]       input    inputs, outputs and gradients
    b, c             [B, T, BC, N]      input    input and output weights; BC is 1, or H if each head has its own
    g, dt            [B, c, H, Q]       fp32     log decays summed from the chunk start (after T: the last sum, because
                                                 g_end is g at Q - 1); factors of x (WITH_DT)
    states, other    [B, c, H, N, V]    input    states before each chunk; with REVERSE L after each chunk, and S
    start, last      [B, H, N, V]       fp32     first and last state; with REVERSE gradients of the last and first

    S <- e^{g_end} S + (B * e^{g_end - g} dt)^T X,   Y = ((C B^T) * G * dt) X + e^g * (C S)
    G_ij = e^{g_i - g_j} for j <= i, otherwise 0

BOUNDED: loads are masked, because T is not a multiple of Q or Q not a power of two. NP, VP and QP are N, V and Q,
padded to powers of two.

Only `state_passing` is sequential over time. A tile holds all Q positions of a chunk on one axis, padded to QP, so the
causal half is a mask and needs no loop. Heads share B and C: `chunk_scan` computes their scores once and loops over
HEADS heads (HEADS is 1 if each head has its own). Exponents are masked differences of g, because unmasked ones overflow
above the diagonal. They keep base e: scaling g for base 2 would round large g, and with it small differences. Sums are
float32 and products use the input dtype. Equations and source: `ssd/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import load_rows, store_rows


@triton.jit
def rows_of(chunk, i, Q: tl.constexpr, T: tl.constexpr):
    """Return the positions of a chunk's entries `i`; T after the chunk's end.

    Rows from T on read as zero and are not written.
    """
    return tl.where(i < Q, chunk * Q + i, T)


@triton.jit
def load_row(ptr, i, Q: tl.constexpr):
    """Return [Q], padded with zeros."""
    return tl.load(ptr + i, mask=i < Q, other=0.0)


@triton.jit
def state_passing_kernel(
    v_ptr, g_ptr, dt_ptr, u_ptr, start_ptr, other_ptr, states_ptr, last_ptr, overlap_ptr,
    T: tl.constexpr, H: tl.constexpr, BC: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr,
    VP: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, BLOCK: tl.constexpr, WITH_DT: tl.constexpr,
    BOUNDED: tl.constexpr, REVERSE: tl.constexpr, KEEP: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Pass BLOCK of the N rows of a head's state through all chunks.

    S <- e^{g_end} S + U^T (w V). Forward: v is x, u is B, w_j = e^{g_end - g_j} dt_j. REVERSE computes the state
    gradient: v is dy, u is C, w_i = e^{g_i}. `states` stores each state before its chunk is added. With OVERLAP,
    overlap [B, c, H, blocks of N] is e^{g_end} <L, S>, a part of the gradient of g_end. Without KEEP only `last` is
    written.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    block, h, b = pid % n_blocks, pid // n_blocks % H, (pid // (n_blocks * H)).to(tl.int64)
    n_N = block * BLOCK + tl.arange(0, BLOCK)
    v_V = tl.arange(0, VP)
    i = tl.arange(0, QP)
    at_NV = n_N[:, None] * V + v_V[None, :]
    is_NV = (n_N < N)[:, None] & (v_V < V)[None, :]
    s_NV = tl.load(start_ptr + (b * H + h) * (N * V) + at_NV, mask=is_NV, other=0.0)
    for step in tl.range(0, n_chunks, num_stages=STAGES):
        chunk = n_chunks - 1 - step if REVERSE else step
        head = (b * n_chunks + chunk) * H + h
        row_Q = rows_of(chunk, i, Q, T)
        v_QV = load_rows(v_ptr + b * T * H * V + h * V, row_Q, H * V, T, V, VP, BOUNDED)
        u_ptrs = u_ptr + b * T * BC * N + h % BC * N + row_Q[:, None] * (BC * N) + n_N[None, :]
        if BOUNDED or N % BLOCK != 0:
            u_QN = tl.load(u_ptrs, mask=(row_Q < T)[:, None] & (n_N < N)[None, :], other=0.0)
        else:
            u_QN = tl.load(u_ptrs)
        g_Q = load_row(g_ptr + head * Q, i, Q)
        end = tl.load(g_ptr + head * Q + Q - 1)
        if KEEP:
            tl.store(states_ptr + head * (N * V) + at_NV, s_NV.to(states_ptr.dtype.element_ty), mask=is_NV)
        if REVERSE:
            w_Q = tl.exp(g_Q)
            if OVERLAP:
                other_NV = tl.load(other_ptr + head * (N * V) + at_NV, mask=is_NV, other=0.0).to(tl.float32)
                tl.store(overlap_ptr + head * n_blocks + block, tl.exp(end) * tl.sum(s_NV * other_NV))
        else:
            w_Q = tl.exp(tl.where(i < Q, end - g_Q, 0.0))
            if WITH_DT:
                w_Q *= load_row(dt_ptr + head * Q, i, Q)
        weighted_QV = (v_QV.to(tl.float32) * w_Q[:, None]).to(v_ptr.dtype.element_ty)
        s_NV = tl.dot(tl.trans(u_QN), weighted_QV, s_NV * tl.exp(end), input_precision=PRECISION)
    tl.store(last_ptr + (b * H + h) * (N * V) + at_NV, s_NV, mask=is_NV)


@triton.jit
def chunk_scan_kernel(
    v_ptr, g_ptr, dt_ptr, rows_ptr, columns_ptr, states_ptr, out_ptr,
    T: tl.constexpr, H: tl.constexpr, BC: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr,
    VP: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    WITH_DT: tl.constexpr, BOUNDED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of a chunk's output for HEADS heads.

    Y = ((C B^T) * G * dt) X + e^g * (C S): v is x, rows C, columns B. REVERSE computes dX = dt * (((B C^T) * G^T) dY +
    e^{g_end - g} * (B L)): v is dy, rows B, columns C, `states` the gradients L after the chunks.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_blocks: tl.constexpr = (Q + BLOCK - 1) // BLOCK
    n_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    group, block, place = pid % n_groups, pid // n_groups % n_blocks, (pid // (n_groups * n_blocks)).to(tl.int64)
    b, chunk = place // n_chunks, place % n_chunks
    i, j = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, QP)
    row_I, row_J = rows_of(chunk, i, Q, T), rows_of(chunk, j, Q, T)
    of_head = b * T * BC * N + group % BC * N
    rows_IN = load_rows(rows_ptr + of_head, row_I, BC * N, T, N, NP, BOUNDED)
    columns_JN = load_rows(columns_ptr + of_head, row_J, BC * N, T, N, NP, BOUNDED)
    scores_IJ = tl.dot(rows_IN, tl.trans(columns_JN), input_precision=PRECISION)
    if REVERSE:
        is_seen_IJ = (i[:, None] <= j[None, :]) & (j < Q)[None, :]
    else:
        is_seen_IJ = (j[None, :] <= i[:, None]) & (i < Q)[:, None]
    for h in tl.range(group * HEADS, tl.minimum(group * HEADS + HEADS, H), num_stages=STAGES):
        head = place * H + h
        v_JV = load_rows(v_ptr + b * T * H * V + h * V, row_J, H * V, T, V, VP, BOUNDED)
        s_NV = load_rows(states_ptr + head * (N * V), tl.arange(0, NP), V, N, V, VP, N != NP)
        g_I, g_J = load_row(g_ptr + head * Q, i, Q), load_row(g_ptr + head * Q, j, Q)
        out_IV = tl.dot(rows_IN, s_NV, input_precision=PRECISION)
        if REVERSE:
            log_decay_IJ = g_J[None, :] - g_I[:, None]
            out_IV *= tl.exp(tl.where(i < Q, tl.load(g_ptr + head * Q + Q - 1) - g_I, 0.0))[:, None]
        else:
            log_decay_IJ = g_I[:, None] - g_J[None, :]
            out_IV *= tl.exp(g_I)[:, None]
        weights_IJ = scores_IJ * tl.exp(tl.where(is_seen_IJ, log_decay_IJ, float("-inf")))
        if WITH_DT and not REVERSE:
            weights_IJ *= load_row(dt_ptr + head * Q, j, Q)[None, :]
        out_IV = tl.dot(weights_IJ.to(v_JV.dtype), v_JV, out_IV, input_precision=PRECISION)
        if WITH_DT and REVERSE:
            out_IV *= load_row(dt_ptr + head * Q, i, Q)[:, None]
        store_rows(out_ptr + b * T * H * V + h * V, row_I, H * V, T, out_IV, V, VP)
