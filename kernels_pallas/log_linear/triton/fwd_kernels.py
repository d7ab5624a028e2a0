"""Triton kernels of log-linear attention: states, outputs; with REVERSE, dX.

    kernel        one program per batch entry and            writes
    states        head, BLOCK rows of S                      states
    chunk_scan    chunk, BLOCK rows of it, HEADS heads       y; with REVERSE dx

    operand          shape              dtype    meaning
    x, y, dy, dx     [B, T, H, V]       input    inputs, outputs and gradients
    b, c             [B, T, N]          input    input and output weights
    g                [B, c, H, Q]       fp32     log decays summed from the chunk start (after T: the last sum)
    reads            [B, c, H, LEVELS]  fp32     summed log decays of the earlier chunks in the aligned block of 2^k
                                                 chunks, i.e. from the state that is read for bit k to the chunk
    m                [B, c, H, L, Q]    fp32     weights of the levels
    states           [B, c, H, N, V]    input    state of each block, at its last chunk; with REVERSE dS,
                                                 the state's gradient after each chunk

`states` is a Fenwick tree: the block that ends with chunk i has 2^k chunks, where k is the number of trailing ones of
i. Chunk i reads, for each set bit k of i, the block that ends before chunk (i >> k) << k. So there is one state per
chunk, as in SSD, and a chunk reads half of the LEVELS on average. LEVELS = ceil(log2(number of chunks)).

BOUNDED: rows are masked, because T is not a multiple of Q. Q is a power of two and at least 16. NP and VP are N and V,
padded to powers of two. Pairs within a chunk have levels 0 to INTRA - 1, and bit k has level FIRST + k, at most L - 1.
Exponents are masked differences of g, because unmasked ones overflow above the diagonal. Sums are float32 and products
use the input dtype. Equations and source: `log_linear/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import load_rows, store_rows


@triton.jit
def level_factor(m_ptr, query, xor_IJ, Q: tl.constexpr, INTRA: tl.constexpr, QUERIES: tl.constexpr):
    """Return the level weights of pairs in a chunk; QUERIES is the axis of `query` in `xor_IJ`."""
    factor_IJ = tl.expand_dims(tl.load(m_ptr + query), 1 - QUERIES)
    for level in tl.static_range(1, INTRA):
        m_IJ = tl.expand_dims(tl.load(m_ptr + level * Q + query), 1 - QUERIES)
        factor_IJ = tl.where(xor_IJ >= 1 << (level - 1), m_IJ, factor_IJ)
    return factor_IJ


@triton.jit
def states_kernel(
    x_ptr, g_ptr, b_ptr, states_ptr,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr, VP: tl.constexpr,
    Q: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, INTRA: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK of the N rows of the states of all blocks.

    A new state is the chunk's own sum plus the states of the levels that close with it, as carries in a binary counter.
    One state per level stays in registers. It keeps the decay of its last chunk; `since` has the log decay after it.
    The last chunk's state is not written, because no chunk reads it.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK
    carried: tl.constexpr = LEVELS - 1 if LEVELS > 1 else 1
    pid = tl.program_id(0)
    block, h, b = pid % n_blocks, pid // n_blocks % H, (pid // (n_blocks * H)).to(tl.int64)
    n_N = block * BLOCK + tl.arange(0, BLOCK)
    v_V = tl.arange(0, VP)
    i = tl.arange(0, Q)
    at_NV = n_N[:, None] * V + v_V[None, :]
    is_NV = (n_N < N)[:, None] & (v_V < V)[None, :]
    saved, since = (), ()
    for _ in tl.static_range(carried):
        saved += (tl.zeros([BLOCK, VP], tl.float32),)
        since += (0.0,)
    for chunk in tl.range(0, n_chunks - 1, num_stages=STAGES):
        head = (b * n_chunks + chunk) * H + h
        row_Q = chunk * Q + i
        x_QV = load_rows(x_ptr + b * T * H * V + h * V, row_Q, H * V, T, V, VP, BOUNDED)
        b_ptrs = b_ptr + b * T * N + row_Q[:, None] * N + n_N[None, :]
        if N % BLOCK != 0:
            b_QN = tl.load(b_ptrs, mask=(n_N < N)[None, :], other=0.0)
        else:
            b_QN = tl.load(b_ptrs)
        end = tl.load(g_ptr + head * Q + Q - 1)
        w_Q = tl.exp(end - tl.load(g_ptr + head * Q + i))
        weighted_QV = (x_QV.to(tl.float32) * w_Q[:, None]).to(x_ptr.dtype.element_ty)
        s_NV = tl.dot(tl.trans(b_QN), weighted_QV, input_precision=PRECISION)
        for k in tl.static_range(carried):
            if (chunk + 1) % (2 << k) == 0:
                s_NV += saved[k] * tl.exp(since[k] + end)
        tl.store(states_ptr + head * (N * V) + at_NV, s_NV.to(states_ptr.dtype.element_ty), mask=is_NV)
        new_saved, new_since = (), ()
        for k in tl.static_range(carried):
            is_new = chunk % (2 << k) == (1 << k) - 1
            new_saved += (tl.where(is_new, s_NV, saved[k]),)
            new_since += (tl.where(is_new, 0.0, since[k] + end),)
        saved, since = new_saved, new_since


@triton.jit
def chunk_scan_kernel(
    v_ptr, g_ptr, reads_ptr, m_ptr, rows_ptr, columns_ptr, states_ptr, out_ptr,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr, VP: tl.constexpr,
    Q: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, INTRA: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of a chunk's output for HEADS heads.

    Y = ((C B^T) * G * M) X + sum_k m_k e^{r_k + g} * (C S_k): v is x, rows C, columns B. REVERSE computes dX = ((B C^T)
    * G^T * M^T) dY + e^{g_end - g} * (B dS): v is dy, rows B, columns C, `states` the gradients dS after the chunks.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_blocks: tl.constexpr = Q // BLOCK
    n_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    group, block, place = pid % n_groups, pid // n_groups % n_blocks, (pid // (n_groups * n_blocks)).to(tl.int64)
    b, chunk = place // n_chunks, place % n_chunks
    i, j = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, Q)
    row_I, row_J = chunk * Q + i, chunk * Q + j
    rows_IN = load_rows(rows_ptr + b * T * N, row_I, N, T, N, NP, BOUNDED)
    columns_JN = load_rows(columns_ptr + b * T * N, row_J, N, T, N, NP, BOUNDED)
    scores_IJ = tl.dot(rows_IN, tl.trans(columns_JN), input_precision=PRECISION)
    xor_IJ = i[:, None] ^ j[None, :]
    for h in tl.range(group * HEADS, tl.minimum(group * HEADS + HEADS, H), num_stages=STAGES):
        head = place * H + h
        v_JV = load_rows(v_ptr + b * T * H * V + h * V, row_J, H * V, T, V, VP, BOUNDED)
        g_I, g_J = tl.load(g_ptr + head * Q + i), tl.load(g_ptr + head * Q + j)
        m_head = m_ptr + head * (L * Q)
        if REVERSE:
            log_decay_IJ = tl.where(i[:, None] <= j[None, :], g_J[None, :] - g_I[:, None], float("-inf"))
            factor_IJ = level_factor(m_head, j, xor_IJ, Q, INTRA, 1)
        else:
            log_decay_IJ = tl.where(j[None, :] <= i[:, None], g_I[:, None] - g_J[None, :], float("-inf"))
            factor_IJ = level_factor(m_head, i, xor_IJ, Q, INTRA, 0)
        weights_IJ = scores_IJ * tl.exp(log_decay_IJ) * factor_IJ
        out_IV = tl.dot(weights_IJ.to(v_JV.dtype), v_JV, input_precision=PRECISION)
        if REVERSE:
            s_NV = load_rows(states_ptr + head * (N * V), tl.arange(0, NP), V, N, V, VP, N != NP)
            read_IV = tl.dot(rows_IN, s_NV, input_precision=PRECISION)
            out_IV += read_IV * tl.exp(tl.load(g_ptr + head * Q + Q - 1) - g_I)[:, None]
        else:
            for k in tl.static_range(LEVELS):
                if (chunk >> k) & 1:
                    last = b * n_chunks + ((chunk >> k) << k) - 1  # of the block's chunks
                    s_ptr = states_ptr + (last * H + h) * (N * V)
                    s_NV = load_rows(s_ptr, tl.arange(0, NP), V, N, V, VP, N != NP)
                    m_I = tl.load(m_head + (FIRST + k if FIRST + k < L else L - 1) * Q + i)
                    w_I = tl.exp(g_I + tl.load(reads_ptr + head * LEVELS + k)) * m_I
                    out_IV += tl.dot(rows_IN, s_NV, input_precision=PRECISION) * w_I[:, None]
        store_rows(out_ptr + b * T * H * V + h * V, row_I, H * V, T, out_IV, V, VP)
