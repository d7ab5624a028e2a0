"""Triton kernels of Top-1 Chunk decoding: one new token against a cache.

    kernel            one program per                                 writes
    every_key_kernel  key-value head and split (share of the chunks)  TOP_K best chunks per query head, and scores
    table_kernel      query head and split                            TOP_K best chunks by table scores, and scores
    listed_kernel     query head and listed chunk (shortlist only)    the chunk, and its best key's score
    attend_kernel     query head                                      o

    operand       shape                    dtype
    q             [B, H, K]                bf16, fp16 or fp32
    k cache       [B, S, G, K]             as q
    v cache       [B, S, G, V]             as q
    table         [B, N_FULL, G, ROWS, K]  fp32
    length        [B]                      int32
    score, chunk  [B, H, splits, TOP_K]    fp32 and int32; a missing chunk is -1
    best, listed  [B, H, LISTED]           fp32 and int32; as score and chunk
    o             [B, H, V]                v's dtype

attend_kernel takes the TOP_K best candidates and computes one softmax over these chunks and the local chunk. Splits are
cut from the actual length, so unused cache costs nothing and a few sequences fill the GPU. Scores are in base 2, except
table scores. every_key_kernel reads each key once, as a product of a chunk with the group's query heads (padded to 16
rows). The other kernels read few rows and use no matrix unit. Source: arXiv 2505.18522, Top-1 Chunk.
"""

import triton
import triton.language as tl

from kernels_pallas.select_chunk.triton.kernels import inserted, new_lists, with_chunk
from kernels_pallas.triton.tile_io import load_rows


@triton.jit
def _share(length, C: tl.constexpr, SPLITS: tl.constexpr, split):
    """Return [begin, end), the full past chunks that this split scores.

    The local chunk has the number (length - 1) // C.
    """
    own = (length - 1) // C
    each = (own + SPLITS - 1) // SPLITS
    begin = split * each
    return begin, tl.minimum(begin + each, own)


@triton.jit
def every_key_kernel(
    q_ptr, k_ptr, length_ptr, score_ptr, chunk_ptr,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, SPLITS: tl.constexpr, TOP_K: tl.constexpr, LOG2_SCALE: tl.constexpr,
    BY_MASS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the best chunks of a split and their scores, [B, H, splits, TOP_K].

    The score is the log-sum-exp of a chunk's keys when BY_MASS, otherwise their largest score. Unused entries are -1.
    """
    R: tl.constexpr = H // G
    pid = tl.program_id(0)
    g = pid % G  # neighbours read the same tokens: a head's row has 128 bytes, and all heads' rows are contiguous
    split = pid // G % SPLITS
    b = (pid // G // SPLITS).to(tl.int64)
    begin, end = _share(tl.load(length_ptr + b), C, SPLITS, split)
    r_R = tl.arange(0, RP)
    q_RK = load_rows(q_ptr + (b * H + g * R) * K, r_R, K, R, K, KP, True)
    k_ptr += b * S * G * K + g * K
    c_C = tl.arange(0, CP)
    bests, sels = new_lists(tl.full([RP], float("-inf"), tl.float32), -1, TOP_K)
    for chunk in tl.range(begin, end):
        k_CK = load_rows(k_ptr, chunk * C + c_C, G * K, S, K, KP, CP != C)
        s_RC = tl.dot(q_RK, tl.trans(k_CK), input_precision=PRECISION) * LOG2_SCALE
        if CP != C:
            s_RC = tl.where((c_C < C)[None, :], s_RC, float("-inf"))
        score_R = tl.max(s_RC, 1)
        if BY_MASS:
            score_R += tl.log2(tl.sum(tl.exp2(s_RC - score_R[:, None]), 1))
        bests, sels = with_chunk(bests, sels, score_R, chunk, 0, True, TOP_K)
    at_R = ((b * H + g * R + r_R) * SPLITS + split) * TOP_K
    for rank in tl.static_range(TOP_K):
        tl.store(score_ptr + at_R + rank, bests[rank], mask=r_R < R)
        tl.store(chunk_ptr + at_R + rank, sels[rank], mask=r_R < R)


@triton.jit
def _products(q_K, row_ptr, c_C, end, STRIDE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Return [C] fp32 products of the query with rows c_C."""
    row_CK = load_rows(row_ptr, c_C, STRIDE, end, K, KP, True)
    return tl.sum(row_CK.to(tl.float32) * q_K[None, :], 1)


@triton.jit
def table_kernel(
    q_ptr, table_ptr, length_ptr, score_ptr, chunk_ptr,
    N_FULL: tl.constexpr, H: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    C: tl.constexpr, SPLITS: tl.constexpr, TOP_K: tl.constexpr, SCALE: tl.constexpr, SQUARED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the best chunks of a split by a table [B, N_FULL, G, ROWS, K].

    The output is as in every_key_kernel; arithmetic is fp32. With x = SCALE q . row, a chunk's score is the largest x,
    or x_0 + x_1^2 / 2 when SQUARED.
    """
    pid = tl.program_id(0)
    h = pid % H
    split = pid // H % SPLITS
    b = (pid // H // SPLITS).to(tl.int64)
    begin, end = _share(tl.load(length_ptr + b), C, SPLITS, split)
    d = tl.arange(0, KP)
    q_K = tl.load(q_ptr + (b * H + h) * K + d, mask=d < K, other=0.0).to(tl.float32) * SCALE
    table_ptr += b * N_FULL * G * ROWS * K + h // (H // G) * ROWS * K
    bests, sels = new_lists(tl.full([], float("-inf"), tl.float32), -1, TOP_K)
    for first in tl.range(begin, end, BLOCK):
        c_C = first + tl.arange(0, BLOCK)
        score_C = _products(q_K, table_ptr, c_C, end, G * ROWS * K, K, KP)
        for row in tl.static_range(1, ROWS):
            x_C = _products(q_K, table_ptr + row * K, c_C, end, G * ROWS * K, K, KP)
            score_C = score_C + 0.5 * x_C * x_C if SQUARED else tl.maximum(score_C, x_C)
        score_C = tl.where(c_C < end, score_C, float("-inf"))
        for rank in tl.static_range(TOP_K):
            top = tl.max(score_C, 0)
            top_chunk = tl.min(tl.where(score_C == top, c_C, N_FULL), 0)
            bests, sels = inserted(bests, sels, top, top_chunk, TOP_K)
            if rank + 1 < TOP_K:
                score_C = tl.where(c_C == top_chunk, float("-inf"), score_C)
    at = ((b * H + h) * SPLITS + split) * TOP_K
    for rank in tl.static_range(TOP_K):
        tl.store(score_ptr + at + rank, bests[rank])
        tl.store(chunk_ptr + at + rank, sels[rank])


@triton.jit
def _load_candidates(score_ptr, chunk_ptr, bh, N: tl.constexpr, NP: tl.constexpr):
    """Return the scores and chunks [N] of a head; missing chunks are -1.

    They come from all splits, or from a list.
    """
    n_N = tl.arange(0, NP)
    score_N = tl.load(score_ptr + bh * N + n_N, mask=n_N < N, other=float("-inf"))
    return score_N, tl.load(chunk_ptr + bh * N + n_N, mask=n_N < N, other=-1)


@triton.jit
def _taken(score_N, chunk_N, NONE: tl.constexpr):
    """Return the best candidate's chunk, and the candidates without it.

    Ties go to the smallest chunk. The chunk is NONE if no candidate is left.
    """
    is_best_N = (score_N == tl.max(score_N, 0)) & (chunk_N >= 0)
    chunk = tl.min(tl.where(is_best_N, chunk_N, NONE), 0)
    return chunk, tl.where(chunk_N == chunk, float("-inf"), score_N), tl.where(chunk_N == chunk, -1, chunk_N)


@triton.jit
def listed_kernel(
    q_ptr, k_ptr, score_ptr, chunk_ptr, best_ptr, listed_ptr,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, LISTED: tl.constexpr, LOG2_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write best and listed [B, H, LISTED]: the first LISTED of N candidates.

    `listed` has their chunks, `best` the score of each chunk's best key.
    """
    pid = tl.program_id(0)
    bh = (pid // LISTED).to(tl.int64)
    b, h = bh // H, bh % H
    score_N, chunk_N = _load_candidates(score_ptr, chunk_ptr, bh, N, NP)
    chunk, score_N, chunk_N = _taken(score_N, chunk_N, S)
    for _rank in tl.range(0, pid % LISTED):
        chunk, score_N, chunk_N = _taken(score_N, chunk_N, S)
    d = tl.arange(0, KP)
    q_K = tl.load(q_ptr + bh * K + d, mask=d < K, other=0.0).to(tl.float32) * LOG2_SCALE
    k_ptr += b * S * G * K + h // (H // G) * K
    best = tl.full([], float("-inf"), tl.float32)
    begin = tl.where(chunk < S, chunk * C, 0)
    end = tl.where(chunk < S, begin + C, 0)
    for first in tl.range(begin, end, BLOCK):
        s_S = first + tl.arange(0, BLOCK)
        score_S = _products(q_K, k_ptr, s_S, end, G * K, K, KP)
        best = tl.maximum(best, tl.max(tl.where(s_S < end, score_S, float("-inf")), 0))
    tl.store(best_ptr + pid, best)
    tl.store(listed_ptr + pid, tl.where(chunk < S, chunk, -1))


@triton.jit
def _visit(
    q_K, k_ptr, v_ptr, m, l, o_V, begin, end,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, LOG2_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the keys in [begin, end)."""
    for first in tl.range(begin, end, BLOCK):
        s_S = first + tl.arange(0, BLOCK)
        k_SK = load_rows(k_ptr, s_S, G * K, end, K, KP, True)
        v_SV = load_rows(v_ptr, s_S, G * V, end, V, VP, True)
        score_S = tl.sum(k_SK.to(tl.float32) * q_K[None, :], 1) * LOG2_SCALE
        score_S = tl.where(s_S < end, score_S, float("-inf"))
        new = tl.maximum(m, tl.max(score_S, 0))
        p_S = tl.exp2(score_S - new)
        decay = tl.exp2(m - new)
        l = l * decay + tl.sum(p_S, 0)
        o_V = o_V * decay + tl.sum(v_SV.to(tl.float32) * p_S[:, None], 0)
        m = new
    return m, l, o_V


@triton.jit
def attend_kernel(
    q_ptr, k_ptr, v_ptr, length_ptr, score_ptr, chunk_ptr, o_ptr,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, TOP_K: tl.constexpr,
    LOG2_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write o [B, H, V] from the TOP_K best of N candidates.

    In the first chunk there is no candidate (-1).
    """
    pid = tl.program_id(0)
    b, h = (pid // H).to(tl.int64), pid % H
    length = tl.load(length_ptr + b)
    score_N, chunk_N = _load_candidates(score_ptr, chunk_ptr, b * H + h, N, NP)
    d = tl.arange(0, KP)
    q_K = tl.load(q_ptr + (b * H + h) * K + d, mask=d < K, other=0.0).to(tl.float32)
    g = h // (H // G)
    k_ptr += b * S * G * K + g * K
    v_ptr += b * S * G * V + g * V
    own = (length - 1) // C * C
    # the local chunk comes first: it always has the newest key, so m is finite before a remote chunk is read
    m, l, o_V = _visit(
        q_K, k_ptr, v_ptr, tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32),
        tl.zeros([VP], tl.float32), own, length, G, K, V, KP, VP, LOG2_SCALE, BLOCK,
    )  # fmt: skip
    for _rank in tl.range(0, TOP_K):
        chunk, score_N, chunk_N = _taken(score_N, chunk_N, S)
        begin = tl.where(chunk < S, chunk * C, 0)
        m, l, o_V = _visit(
            q_K, k_ptr, v_ptr, m, l, o_V, begin, tl.where(chunk < S, begin + C, 0),
            G, K, V, KP, VP, LOG2_SCALE, BLOCK,
        )  # fmt: skip
    e = tl.arange(0, VP)
    tl.store(o_ptr + (b * H + h) * V + e, (o_V / l).to(o_ptr.dtype.element_ty), mask=e < V)
