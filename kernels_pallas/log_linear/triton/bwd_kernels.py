"""Triton backward kernels of log-linear attention.

    kernel         one program per batch entry and           writes
    gradients      head, bit, BLOCK rows of S                gradients of the states, as they are read
    combine        chunk, head, BLOCK entries of dS          state gradients dS, parts of the decays' gradients
    inside_bwd     chunk, HEADS heads                        dx; ds, dm and parts of dg from inside the chunk
    reads_bwd      chunk, BLOCK rows of it, HEADS heads      parts of dC and dm through the states

    operand           shape                      dtype    meaning
    x, dy, dx         [B, T, H, V]               input    inputs, gradients of outputs and inputs
    b, c              [B, T, N]                  input    as in fwd_kernels.py, as are g, reads and m
    states            [B, c, H, N, V]            input    states of blocks; gradients have the same places
    after             [B, c, H, LEVELS]          fp32     summed log decays of the later chunks in each aligned block
    ends              [B, c, H]                  fp32     log decay over the chunk
    merged            [B, c, H, LEVELS, blocks]  fp32     gradient of the log decay over a block that joins its sibling
    ds                [B, c, H / HEADS, Q, Q]    fp32     gradient of C B^T, summed over HEADS heads
    sum               [B, c, H / HEADS, Q, N]    fp32     part of dC, summed over HEADS heads
    as_key            [B, c, H, Q]               fp32     parts of dg
    dm                [B, c, H, INTRA, Q]        fp32     from inside the chunk; reads_bwd writes LEVELS rows

dB through the states is SSD's `states_bwd_kernel`. No atomics are used: two runs give equal bits. Equations and source:
`log_linear/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.log_linear.triton.fwd_kernels import decays, level_sums, level_weights
from kernels_pallas.triton.tile_io import load_rows, store_rows


@triton.jit
def gradients_kernel(
    dy_ptr, g_ptr, m_ptr, c_ptr, out_ptr,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr, VP: tl.constexpr,
    Q: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, INTRA: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK of the N rows of the gradients of the states that are read for bit k.

    Visits the chunks with bit k set, from the last to the first. Each aligned run of 2^k of them reads the state that
    ends before the run: its gradient is stored when the run's first chunk is added.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    k, block = pid % LEVELS, pid // LEVELS % n_blocks
    h, b = pid // (LEVELS * n_blocks) % H, (pid // (LEVELS * n_blocks * H)).to(tl.int64)
    n_N = block * BLOCK + tl.arange(0, BLOCK)
    v_V = tl.arange(0, VP)
    i = tl.arange(0, Q)
    at_NV = n_N[:, None] * V + v_V[None, :]
    is_NV = (n_N < N)[:, None] & (v_V < V)[None, :]
    run = 1 << k
    n_visits = n_chunks // (2 * run) * run + tl.maximum(n_chunks % (2 * run) - run, 0)
    m_ptr += tl.minimum(FIRST + k, L - 1) * Q
    s_NV = tl.zeros([BLOCK, VP], tl.float32)
    for step in tl.range(0, n_visits, num_stages=STAGES):
        visit = n_visits - 1 - step
        place = visit % run  # in its run
        chunk = visit // run * (2 * run) + run + place
        head = (b * n_chunks + chunk) * H + h
        row_Q = chunk * Q + i
        dy_QV = load_rows(dy_ptr + b * T * H * V + h * V, row_Q, H * V, T, V, VP, BOUNDED)
        c_ptrs = c_ptr + b * T * N + row_Q[:, None] * N + n_N[None, :]
        if BOUNDED or N % BLOCK != 0:
            c_QN = tl.load(c_ptrs, mask=(row_Q < T)[:, None] & (n_N < N)[None, :], other=0.0)
        else:
            c_QN = tl.load(c_ptrs)
        w_Q = tl.exp(tl.load(g_ptr + head * Q + i)) * tl.load(m_ptr + head * (L * Q) + i)
        end = tl.load(g_ptr + head * Q + Q - 1)
        weighted_QV = (dy_QV.to(tl.float32) * w_Q[:, None]).to(dy_ptr.dtype.element_ty)
        s_NV *= tl.where(place == run - 1, 0.0, tl.exp(end))
        s_NV = tl.dot(tl.trans(c_QN), weighted_QV, s_NV, input_precision=PRECISION)
        out_ptrs = out_ptr + ((b * n_chunks + chunk - 1) * H + h) * (N * V) + at_NV
        tl.store(out_ptrs, s_NV.to(out_ptr.dtype.element_ty), mask=is_NV & (place == 0))


@triton.jit
def combine_kernel(
    reads_ptr, after_ptr, ends_ptr, gradients_ptr, states_ptr, out_ptr, merged_ptr,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr, VP: tl.constexpr,
    Q: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, INTRA: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute L after a chunk, BLOCK of the N V entries, from the gradients of the states that contain the chunk.

    These are one state for each clear bit k of the chunk, if it is read at all. Where bit k and all lower bits of the
    chunk are set, two blocks of 2^k chunks end as one: `merged` is the derivative of the decay over the second block.
    Absent entries are masked loads, so that all loads are in flight together.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_blocks: tl.constexpr = (N * V + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    block, h, place = pid % n_blocks, pid // n_blocks % H, (pid // (n_blocks * H)).to(tl.int64)
    b, chunk = place // n_chunks, place % n_chunks
    head = place * H + h
    at = block * BLOCK + tl.arange(0, BLOCK)
    is_in = at < N * V
    l = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(LEVELS):
        start = ((chunk >> k) + 1) << k  # of the chunks that read the state
        is_read = ((chunk >> k) % 2 == 0) & (start < n_chunks)
        ptrs = gradients_ptr + ((b * n_chunks + start - 1) * H + h) * (N * V) + at
        part = tl.load(ptrs, mask=is_in & is_read, other=0.0).to(tl.float32)
        l += part * tl.exp(tl.load(after_ptr + head * LEVELS + k))
    tl.store(out_ptr + head * (N * V) + at, l.to(out_ptr.dtype.element_ty), mask=is_in)
    end = tl.load(ends_ptr + head)
    for k in tl.static_range(LEVELS):
        closes = (chunk + 1) % (2 << k) == 0
        ptrs = states_ptr + ((place - (1 << k)) * H + h) * (N * V) + at
        s = tl.load(ptrs, mask=is_in & closes, other=0.0).to(tl.float32)
        merged = tl.exp(tl.load(reads_ptr + head * LEVELS + k) + end) * tl.sum(l * s)
        tl.store(merged_ptr + (head * LEVELS + k) * n_blocks + block, merged)


@triton.jit
def inside_bwd_kernel(
    x_ptr, dy_ptr, g_ptr, m_ptr, b_ptr, c_ptr, d_states_ptr, dx_ptr, ds_ptr, as_key_ptr, dm_ptr,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr, VP: tl.constexpr,
    Q: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, INTRA: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dX, and dS = (dY X^T) * G * M summed over HEADS heads, for all queries i and keys j of a chunk.

    dm has the row sums of (dY X^T) * G * (C B^T) over each level. W = dS * (C B^T) is the derivative of the log decay
    between i and j < i: as_key is sum_i W_ij. The caller computes sum_j W_ij from m and dm.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    group, place = pid % n_groups, (pid // n_groups).to(tl.int64)
    b, chunk = place // n_chunks, place % n_chunks
    i = tl.arange(0, Q)
    row_Q = chunk * Q + i
    c_IN = load_rows(c_ptr + b * T * N, row_Q, N, T, N, NP, BOUNDED)
    b_JN = load_rows(b_ptr + b * T * N, row_Q, N, T, N, NP, BOUNDED)
    scores_IJ = tl.dot(c_IN, tl.trans(b_JN), input_precision=PRECISION)
    scores_IJ = tl.where(i[None, :] <= i[:, None], scores_IJ, 0.0)
    ds_IJ = tl.zeros([Q, Q], tl.float32)
    level_18 = tl.arange(0, 8)[None, :]
    for h in tl.range(group * HEADS, tl.minimum(group * HEADS + HEADS, H), num_stages=STAGES):
        head = place * H + h
        of_x = b * T * H * V + h * V
        dy_IV = load_rows(dy_ptr + of_x, row_Q, H * V, T, V, VP, BOUNDED)
        x_JV = load_rows(x_ptr + of_x, row_Q, H * V, T, V, VP, BOUNDED)
        d_state_NV = load_rows(d_states_ptr + head * (N * V), tl.arange(0, NP), V, N, V, VP, N != NP)
        g_I, g_J = tl.load(g_ptr + head * Q + i), tl.load(g_ptr + head * Q + i)  # twice, for rows and for columns
        decay_IJ = decays(g_I, g_J)
        m_IJ = level_weights(m_ptr + head * (L * Q), i, Q, INTRA)
        here_IJ = tl.dot(dy_IV, tl.trans(x_JV), input_precision=PRECISION) * decay_IJ
        ds_IJ += here_IJ * m_IJ
        here_IJ *= scores_IJ
        w_J = tl.sum(tl.where(i[None, :] < i[:, None], here_IJ * m_IJ, 0.0), 0)
        tl.store(as_key_ptr + head * Q + i, w_J)
        dm_ptrs = dm_ptr + (head * INTRA + level_18) * Q + i[:, None]
        tl.store(dm_ptrs, level_sums(here_IJ, i, Q, INTRA), mask=level_18 < INTRA)
        weights_IJ = (scores_IJ * decay_IJ * m_IJ).to(dy_IV.dtype)
        to_end_J = tl.exp(tl.load(g_ptr + head * Q + Q - 1) - tl.load(g_ptr + head * Q + i))
        dx_JV = tl.dot(b_JN, d_state_NV, input_precision=PRECISION) * to_end_J[:, None]
        dx_JV = tl.dot(tl.trans(weights_IJ), dy_IV, dx_JV, input_precision=PRECISION)
        store_rows(dx_ptr + of_x, row_Q, H * V, T, dx_JV, V, VP)
    ds_IJ = tl.where(i[None, :] <= i[:, None], ds_IJ, 0.0)
    tl.store(ds_ptr + ((place * n_groups + group) * Q + i[:, None]) * Q + i[None, :], ds_IJ)


@triton.jit
def reads_bwd_kernel(
    dy_ptr, g_ptr, reads_ptr, m_ptr, c_ptr, states_ptr, sum_ptr, dm_ptr,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr, VP: tl.constexpr,
    Q: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, INTRA: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of sum_h sum_k m_k e^{r_k + g} * (dY_h S_k^T), and the gradients of m_k.

    Levels are the outer loop: the sum stays in registers, and the heads' loads are pipelined.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_blocks: tl.constexpr = Q // BLOCK
    n_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    group, block, place = pid % n_groups, pid // n_groups % n_blocks, (pid // (n_groups * n_blocks)).to(tl.int64)
    b, chunk = place // n_chunks, place % n_chunks
    i = block * BLOCK + tl.arange(0, BLOCK)
    row_I = chunk * Q + i
    c_IN = load_rows(c_ptr + b * T * N, row_I, N, T, N, NP, BOUNDED)
    sum_IN = tl.zeros([BLOCK, NP], tl.float32)
    for k in tl.range(0, LEVELS, num_stages=1):
        dm_k_ptr = dm_ptr + place * (H * LEVELS * Q) + k * Q + i
        if (chunk >> k) & 1:
            last = b * n_chunks + ((chunk >> k) << k) - 1  # of the block's chunks
            for h in tl.range(group * HEADS, tl.minimum(group * HEADS + HEADS, H), num_stages=STAGES):
                head = place * H + h
                dy_IV = load_rows(dy_ptr + b * T * H * V + h * V, row_I, H * V, T, V, VP, BOUNDED)
                s_NV = load_rows(states_ptr + (last * H + h) * (N * V), tl.arange(0, NP), V, N, V, VP, N != NP)
                w_I = tl.exp(tl.load(g_ptr + head * Q + i) + tl.load(reads_ptr + head * LEVELS + k))
                m_I = tl.load(m_ptr + (head * L + tl.minimum(FIRST + k, L - 1)) * Q + i)
                term_IN = tl.dot(dy_IV, tl.trans(s_NV), input_precision=PRECISION)
                tl.store(dm_k_ptr + h * (LEVELS * Q), tl.sum(term_IN * c_IN.to(tl.float32), 1) * w_I)
                sum_IN += term_IN * (w_I * m_I)[:, None]
        else:
            for h in tl.range(group * HEADS, tl.minimum(group * HEADS + HEADS, H), num_stages=1):
                tl.store(dm_k_ptr + h * (LEVELS * Q), tl.zeros([BLOCK], tl.float32))
    store_rows(sum_ptr + (place * n_groups + group) * (Q * N), i, N, Q, sum_IN, N, NP)
