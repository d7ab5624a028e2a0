"""Triton kernels of the index loss: rows sorted by block.

    x = log2(e) q . k / sqrt(K),  p = mean over the R heads of 2^(x - lse_r)          R = H / G heads of a key head
    y = log2(e) q^I . k^I / sqrt(N) - lse_R,  r = 2^y
    loss = ln 2 sum p (log2 p - y),  dq^I = (r - p) k^I,  dk^I = (r - p)^T q^I        without scale and mean

    kernel       one program per                              writes
    lse_kernel   segment of rows that read the same block     lse parts
    loss_kernel  segment of rows that read the same block     loss, dq parts, dk parts
    keys_kernel  batch entry, block and piece                 dk

    operand    shape                       dtype
    index_q    [B, T, G, N]                bf16, fp16 or fp32
    index_k    [B, T, N]                   as index_q
    q          [B, T, H, K]                as index_q
    k          [B, T, G, K]                as index_q
    order      [B, G, ROWS]                int32, the sorted rows (sort_plan.py)
    first      [B, G, NC + 1]              int32, place of each block's first row in order
    ends       [B, G, NC]                  int32, number of segments up to each block's last
    lse parts  [B, T, G, READ, PIECES, R + 1]  fp32, base 2; the index is last
    lse        [B, T, G, R + 1]            fp32, base 2, over all keys that the query reads
    loss       [B, G, SEGMENTS, PIECES]    fp32, nats
    dq parts   [B, T, G, READ, PIECES, N]  q's dtype
    dk parts   [B, G, SEGMENTS, C, N]      fp32
    dk         [B, T, N]                   fp32, multiplied by SCALE

A query reads READ blocks, its local block first, and has a row for each of them: row t READ + j. Parts of a row without
a block, and dk parts of segments that do not exist, are not written. A block's PIECES of BLOCK_N keys have separate
programs. All heads of a group read the same blocks, so one program computes the weights of all of them. There are no
atomics: two runs give the same bits. Source: `index_loss/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.top1_chunk.triton.attention_kernels import at_stride
from kernels_pallas.triton.sort_plan_kernels import block_of
from kernels_pallas.triton.tile_io import LN2, load_rows, store_rows

# Not -inf: a query without a key in a piece gets exp2(-inf) = 0, not NaN from -inf - (-inf).
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _place(
    order_ptr, first_ptr, ends_ptr,
    G: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
    SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Return the program's (batch entry, key head, segment, piece, block, its order, first and last place).

    The block is NC and the places are empty if there are fewer segments.
    """
    pid, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    bg, segment = pid // SEGMENTS, pid % SEGMENTS
    chunk, nth = block_of(ends_ptr + bg * NC, segment, NC, NCP)
    first_ptr += bg * (NC + 1)
    begin = tl.load(first_ptr + tl.minimum(chunk, NC)) + nth * SEGMENT
    stop = tl.load(first_ptr + tl.minimum(chunk + 1, NC))
    end = tl.where(chunk < NC, tl.minimum(begin + SEGMENT, stop), begin)
    return (bg // G).to(tl.int64), bg % G, segment, piece, chunk, order_ptr + bg.to(tl.int64) * ROWS, begin, end


@triton.jit
def _scores(q_MK, k_SK, is_seen_MS, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the scores in base 2; -inf for keys that are not seen."""
    x_MS = tl.dot(q_MK, tl.trans(k_SK), input_precision=PRECISION) * LOG2_SCALE
    return tl.where(is_seen_MS, x_MS, float("-inf"))


@triton.jit
def _logsumexp(x_MS):
    """Return the logarithm of the sum of powers, in base 2; -inf for rows of -inf."""
    most_M = tl.maximum(tl.max(x_MS, 1), LOWEST)
    return most_M + tl.log2(tl.sum(tl.exp2(x_MS - most_M[:, None]), 1))


@triton.jit
def lse_kernel(
    index_q_ptr, index_k_ptr, q_ptr, k_ptr, order_ptr, first_ptr, ends_ptr, lse_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, N: tl.constexpr, KP: tl.constexpr,
    NP: tl.constexpr, C: tl.constexpr, READ: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr,
    SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, PIECES: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, INDEX_LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the lse parts [B, T, G, READ, PIECES, R + 1] of the segment's rows."""
    R: tl.constexpr = H // G
    ROWS: tl.constexpr = T * READ
    PARTS: tl.constexpr = READ * PIECES
    b, g, _segment, piece, chunk, order_ptr, begin, end = _place(
        order_ptr, first_ptr, ends_ptr, G, NC, NCP, ROWS, PIECES, SEGMENTS, SEGMENT
    )
    n_S = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    key_S = tl.where(n_S < C, chunk * C + n_S, T)
    k_SK = load_rows(k_ptr + b * T * G * K + g * K, key_S, G * K, T, K, KP, True)
    index_k_SN = load_rows(index_k_ptr + b * T * N, key_S, N, T, N, NP, True)
    lse_ptr += b * T * G * PARTS * (R + 1)
    for start in tl.range(begin, end, BLOCK_M):
        place_M = start + tl.arange(0, BLOCK_M)
        row_M = tl.load(order_ptr + place_M, mask=place_M < end, other=ROWS)
        t_M = row_M // READ
        is_row_M = t_M < T
        is_seen_MS = (key_S[None, :] <= t_M[:, None]) & (key_S < T)[None, :]
        part_M = (at_stride(t_M, T * G * PARTS * (R + 1)) * G + g) * PARTS + row_M % READ * PIECES + piece
        index_q_MN = load_rows(index_q_ptr + b * T * G * N + g * N, t_M, G * N, T, N, NP, True)
        lse_M = _logsumexp(_scores(index_q_MN, index_k_SN, is_seen_MS, INDEX_LOG2_SCALE, PRECISION))
        tl.store(lse_ptr + part_M * (R + 1) + R, lse_M, mask=is_row_M)
        for r in tl.range(0, R, loop_unroll_factor=AT_ONCE):
            q_MK = load_rows(q_ptr + b * T * H * K + (g * R + r) * K, t_M, H * K, T, K, KP, True)
            lse_M = _logsumexp(_scores(q_MK, k_SK, is_seen_MS, LOG2_SCALE, PRECISION))
            tl.store(lse_ptr + part_M * (R + 1) + r, lse_M, mask=is_row_M)


@triton.jit
def loss_kernel(
    index_q_ptr, index_k_ptr, q_ptr, k_ptr, order_ptr, first_ptr, ends_ptr, lse_ptr, loss_ptr, dq_ptr, dk_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, N: tl.constexpr, KP: tl.constexpr,
    NP: tl.constexpr, C: tl.constexpr, READ: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr,
    SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, PIECES: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, INDEX_LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
    GRADIENTS: tl.constexpr,
):  # fmt: skip
    """Write the segment's loss and, with GRADIENTS, its rows' dq parts and its dk part."""
    R: tl.constexpr = H // G
    ROWS: tl.constexpr = T * READ
    PARTS: tl.constexpr = READ * PIECES
    b, g, segment, piece, chunk, order_ptr, begin, end = _place(
        order_ptr, first_ptr, ends_ptr, G, NC, NCP, ROWS, PIECES, SEGMENTS, SEGMENT
    )
    n_S = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    key_S = tl.where(n_S < C, chunk * C + n_S, T)
    k_SK = load_rows(k_ptr + b * T * G * K + g * K, key_S, G * K, T, K, KP, True)
    index_k_SN = load_rows(index_k_ptr + b * T * N, key_S, N, T, N, NP, True)
    lse_ptr += b * T * G * (R + 1)
    loss_M = tl.zeros([BLOCK_M], tl.float32)
    dk_SN = tl.zeros([BLOCK_N, NP], tl.float32)
    for start in tl.range(begin, end, BLOCK_M):
        place_M = start + tl.arange(0, BLOCK_M)
        row_M = tl.load(order_ptr + place_M, mask=place_M < end, other=ROWS)
        t_M = row_M // READ
        is_row_M = t_M < T
        is_seen_MS = (key_S[None, :] <= t_M[:, None]) & (key_S < T)[None, :]
        at_M = (t_M * G + g) * (R + 1)
        p_MS = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for r in tl.range(0, R, loop_unroll_factor=AT_ONCE):
            q_MK = load_rows(q_ptr + b * T * H * K + (g * R + r) * K, t_M, H * K, T, K, KP, True)
            lse_M = tl.load(lse_ptr + at_M + r, mask=is_row_M, other=0.0)
            p_MS += tl.exp2(_scores(q_MK, k_SK, is_seen_MS, LOG2_SCALE, PRECISION) - lse_M[:, None])
        p_MS *= 1 / R
        index_q_MN = load_rows(index_q_ptr + b * T * G * N + g * N, t_M, G * N, T, N, NP, True)
        lse_M = tl.load(lse_ptr + at_M + R, mask=is_row_M, other=0.0)
        y_MS = _scores(index_q_MN, index_k_SN, is_seen_MS, INDEX_LOG2_SCALE, PRECISION) - lse_M[:, None]
        of_key_MS = tl.where((p_MS > 0) & is_row_M[:, None], p_MS * (tl.log2(p_MS) - y_MS), 0.0)
        loss_M += tl.sum(of_key_MS, 1)
        if GRADIENTS:
            di_MS = (tl.exp2(y_MS) - p_MS).to(index_k_SN.dtype)
            dq_MN = tl.dot(di_MS, index_k_SN, input_precision=PRECISION)
            part_M = (at_stride(t_M, T * G * PARTS * N) * G + g) * PARTS + row_M % READ * PIECES + piece
            store_rows(dq_ptr + b * T * G * PARTS * N, part_M, N, T * G * PARTS, dq_MN, N, NP)
            dk_SN = tl.dot(tl.trans(di_MS), index_q_MN, dk_SN, input_precision=PRECISION)
    part = (b * G + g) * SEGMENTS + segment
    tl.store(loss_ptr + part * PIECES + piece, tl.sum(loss_M, 0) * LN2)
    if GRADIENTS:
        store_rows(dk_ptr + part * C * N, n_S, N, tl.where(chunk < NC, C, 0), dk_SN, N, NP)


@triton.jit
def keys_kernel(
    part_ptr, ends_ptr, dk_ptr,
    T: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, C: tl.constexpr, NC: tl.constexpr,
    SEGMENTS: tl.constexpr, PIECES: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Write dk [B, T, N]: the sum of the dk parts of a block's segments and of all key heads."""
    pid, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    b, chunk = (pid // NC).to(tl.int64), pid % NC
    n_S = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    dk_SN = tl.zeros([BLOCK_N, NP], tl.float32)
    for g in tl.range(0, G):
        bg = b * G + g
        begin = tl.load(ends_ptr + bg * NC + chunk - 1, mask=chunk > 0, other=0)
        for segment in tl.range(begin, tl.load(ends_ptr + bg * NC + chunk)):
            dk_SN += load_rows(part_ptr + (bg * SEGMENTS + segment) * C * N, n_S, N, C, N, NP, True)
    key_S = tl.where(n_S < C, chunk * C + n_S, T)
    store_rows(dk_ptr + b * T * N, key_S, N, T, dk_SN * SCALE, N, NP)
