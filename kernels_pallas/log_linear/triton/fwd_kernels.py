"""Triton kernels of log-linear attention: states and outputs.

    kernel        one program per batch entry and            writes
    states        head, BLOCK rows of S                      states
    chunk_scan    chunk, BLOCK rows of it, HEADS heads       y

    operand          shape              dtype    meaning
    x, y, dy, dx     [B, T, H, V]       input    inputs, outputs and gradients
    b, c             [B, T, N]          input    input and output weights
    g                [B, c, H, Q]       fp32     log decays summed from the chunk start (after T: the last sum)
    reads            [B, c, H, LEVELS]  fp32     summed log decays of the earlier chunks in the aligned block of 2^k
                                                 chunks, i.e. from the state that is read for bit k to the chunk
    m                [B, c, H, L, Q]    fp32     weights of the levels
    states           [B, c, H, N, V]    input    state of each block, at its last chunk

`states` is a Fenwick tree: the block that ends with chunk i has 2^k chunks, where k is the number of trailing ones of
i. Chunk i reads, for each set bit k of i, the block that ends before chunk (i >> k) << k. So there is one state per
chunk, as in SSD, and a chunk reads half of the LEVELS on average. LEVELS = ceil(log2(number of chunks)).

BOUNDED: rows are masked, because T is not a multiple of Q. Q is a power of two and at least 16. NP and VP are N and V,
padded to powers of two. Pairs within a chunk have levels 0 to INTRA - 1, and bit k has level FIRST + k, at most L - 1.
Exponents are bounded by 0, because differences of g overflow above the diagonal. Sums are float32 and products use the
input dtype. Equations and source: `log_linear/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import LOG2_E, load_rows, store_rows


@triton.jit
def decays(g_I, g_J):
    """Return e^{g_i - g_j} for j <= i; entries for later keys are at most 1."""
    return tl.exp2(tl.minimum(g_I[:, None] - g_J[None, :], 0.0) * LOG2_E)


@triton.jit
def halves(x_IJ):
    """Return the left and the right half of the columns."""
    I: tl.constexpr = x_IJ.shape[0]
    J: tl.constexpr = x_IJ.shape[1]
    return tl.split(tl.permute(tl.reshape(x_IJ, [I, 2, J // 2]), (0, 2, 1)))


@triton.jit
def level_weights(m_ptr, i, Q: tl.constexpr, INTRA: tl.constexpr):
    """Return the level weights of queries i and the keys j <= i of the chunk, [I, Q]; later keys get any of them.

    Starts with the aligned block of 8 positions around i and doubles it. Where the next bit of i is set, the other half
    is earlier, and all its pairs have the same level.
    """
    I: tl.constexpr = i.shape[0]
    xor_I8 = (i[:, None] & 7) ^ tl.arange(0, 8)[None, :]
    w_IJ = tl.load(m_ptr + i)[:, None]
    for level in tl.static_range(1, 4):
        m_I = tl.load(m_ptr + min(level, INTRA - 1) * Q + i)
        w_IJ = tl.where(xor_I8 >= 1 << (level - 1), m_I[:, None], w_IJ)
    for level in tl.static_range(4, Q.bit_length()):
        m_I = tl.load(m_ptr + min(level, INTRA - 1) * Q + i)
        left_IJ = tl.where(((i >> (level - 1)) & 1 == 1)[:, None], m_I[:, None], w_IJ)
        w_IJ = tl.reshape(tl.permute(tl.join(left_IJ, w_IJ), (0, 2, 1)), [I, 1 << level])
    return w_IJ


@triton.jit
def level_sums(x_IJ, i, Q: tl.constexpr, INTRA: tl.constexpr):
    """Return the sums over the keys of each level, [I, 8], for x [I, Q] that is 0 for later keys.

    Halves the columns down to the aligned block of 8 positions around i.
    """
    at_18 = tl.arange(0, 8)[None, :]
    xor_I8 = (i[:, None] & 7) ^ at_18
    sums_I8 = tl.zeros([i.shape[0], 8], tl.float32)
    for level in tl.static_range(Q.bit_length() - 1, -1, -1):
        if level >= 4:
            left_IJ, right_IJ = halves(x_IJ)
            is_later_I = (i >> (level - 1)) & 1 == 1
            sum_I = tl.where(is_later_I, tl.sum(left_IJ, 1), 0.0)
            x_IJ = tl.where(is_later_I[:, None], right_IJ, left_IJ)
        else:
            is_here_I8 = (xor_I8 >= (1 << level) // 2) & (xor_I8 < 1 << level)
            sum_I = tl.sum(tl.where(is_here_I8, x_IJ, 0.0), 1)
        sums_I8 += tl.where(at_18 == min(level, INTRA - 1), sum_I[:, None], 0.0)
    return sums_I8


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
    x_ptr, g_ptr, reads_ptr, m_ptr, c_ptr, b_ptr, states_ptr, y_ptr,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, NP: tl.constexpr, VP: tl.constexpr,
    Q: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, INTRA: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK rows of Y = ((C B^T) * G * M) X + sum_k m_k e^{r_k + g} * (C S_k) for HEADS heads.

    One loop over heads and the states they read keeps the next state in flight. A head's pairs within the chunk come
    after its last state. Chunk 0 reads one state of zeros.
    """
    n_chunks: tl.constexpr = (T + Q - 1) // Q
    n_blocks: tl.constexpr = Q // BLOCK
    n_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    group, block, place = pid % n_groups, pid // n_groups % n_blocks, (pid // (n_groups * n_blocks)).to(tl.int64)
    b, chunk = place // n_chunks, place % n_chunks
    i, j = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, Q)
    row_I, row_J = chunk * Q + i, chunk * Q + j
    c_IN = load_rows(c_ptr + b * T * N, row_I, N, T, N, NP, BOUNDED)
    b_JN = load_rows(b_ptr + b * T * N, row_J, N, T, N, NP, BOUNDED)
    scores_IJ = tl.dot(c_IN, tl.trans(b_JN), input_precision=PRECISION)
    scores_IJ = tl.where(j[None, :] <= i[:, None], scores_IJ, 0.0)
    v_V, n_N = tl.arange(0, VP), tl.arange(0, NP)
    at_NV = n_N[:, None] * V + v_V[None, :]
    is_NV = (n_N < N)[:, None] & (v_V < V)[None, :] & (chunk > 0)
    bits, n_reads = tl.zeros([], tl.int64), 0  # the set bits of the chunk's number, 4 bits each
    for k in tl.static_range(LEVELS):
        is_set = (chunk >> k) & 1
        bits |= is_set * k << (4 * n_reads)
        n_reads += is_set
    n_reads = tl.maximum(n_reads, 1)
    y_IV = tl.zeros([BLOCK, VP], tl.float32)
    for step in tl.range(0, tl.minimum(HEADS, H - group * HEADS) * n_reads, num_stages=STAGES):
        h, read = group * HEADS + step // n_reads, step % n_reads
        bit = (bits >> (4 * read)) & 15
        last = b * n_chunks + ((chunk >> bit) << bit) - 1  # of the block's chunks
        head = place * H + h
        s_NV = tl.load(states_ptr + (last * H + h) * (N * V) + at_NV, mask=is_NV, other=0.0)
        m_head = m_ptr + head * (L * Q)
        g_I, m_I = tl.load(g_ptr + head * Q + i), tl.load(m_head + tl.minimum(FIRST + bit, L - 1) * Q + i)
        w_I = tl.exp(g_I + tl.load(reads_ptr + head * LEVELS + bit)) * m_I
        y_IV = tl.where(read == 0, 0.0, y_IV) + tl.dot(c_IN, s_NV, input_precision=PRECISION) * w_I[:, None]
        if read == n_reads - 1:
            x_JV = load_rows(x_ptr + b * T * H * V + h * V, row_J, H * V, T, V, VP, BOUNDED)
            g_J = tl.load(g_ptr + head * Q + j)
            weights_IJ = (scores_IJ * decays(g_I, g_J) * level_weights(m_head, i, Q, INTRA)).to(x_JV.dtype)
            sum_IV = tl.dot(weights_IJ, x_JV, y_IV, input_precision=PRECISION)
            store_rows(y_ptr + b * T * H * V + h * V, row_I, H * V, T, sum_IV, V, VP)
