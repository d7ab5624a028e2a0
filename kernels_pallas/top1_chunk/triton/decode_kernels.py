"""Triton kernels of Top-1 Chunk decoding: one new token per batch entry against a cache.

1. `every_key_kernel` or `approx_kernel`: each program scores a share ("split") of the past chunks and keeps its best,
   so that a few sequences fill the GPU too. The shares are cut from the actual length: what lies beyond it costs
   nothing.
2. `attend_kernel`: the best of the splits (ties: the first, which holds the smaller chunks), then one softmax over
   that chunk and the own one.

Scores are in units of log2. Exact and best_key read every key once, as a product of the group's query heads (padded to
16 rows) with a chunk; everything else reads a few rows and needs no matrix unit.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import load_rows


@triton.jit
def _share(length, C: tl.constexpr, SPLITS: tl.constexpr, split):
    """[begin, end) of the full past chunks that this split scores; the own chunk is number (length - 1) // C."""
    own = (length - 1) // C
    each = (own + SPLITS - 1) // SPLITS
    begin = split * each
    return begin, tl.minimum(begin + each, own)


@triton.jit
def every_key_kernel(
    q_ptr, k_ptr, length_ptr, score_ptr, chunk_ptr,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, SPLITS: tl.constexpr, LOG2_SCALE: tl.constexpr, BY_MASS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes score [B, H, splits] fp32 and chunk [B, H, splits]: the best chunk of a share, and its score.

    The score is the log-sum-exp of the chunk's keys when BY_MASS, otherwise the largest of theirs.
    """
    R: tl.constexpr = H // G
    pid = tl.program_id(0)
    g = pid % G  # neighbours read the same tokens: rows of one head are 128 bytes, those of all are contiguous
    split = pid // G % SPLITS
    b = (pid // G // SPLITS).to(tl.int64)
    begin, end = _share(tl.load(length_ptr + b), C, SPLITS, split)
    r_R = tl.arange(0, RP)
    q_RK = load_rows(q_ptr + (b * H + g * R) * K, r_R, K, R, K, KP, True)
    k_ptr += b * S * G * K + g * K
    c_C = tl.arange(0, CP)
    best_R = tl.full([RP], float("-inf"), tl.float32)
    chunk_R = tl.full([RP], -1, tl.int32)
    for chunk in tl.range(begin, end):
        k_CK = load_rows(k_ptr, chunk * C + c_C, G * K, S, K, KP, CP != C)
        s_RC = tl.dot(q_RK, tl.trans(k_CK), input_precision=PRECISION) * LOG2_SCALE
        if CP != C:
            s_RC = tl.where((c_C < C)[None, :], s_RC, float("-inf"))
        score_R = tl.max(s_RC, 1)
        if BY_MASS:
            score_R += tl.log2(tl.sum(tl.exp2(s_RC - score_R[:, None]), 1))
        chunk_R = tl.where(score_R > best_R, chunk, chunk_R)
        best_R = tl.maximum(best_R, score_R)
    at_R = (b * H + g * R + r_R) * SPLITS + split
    tl.store(score_ptr + at_R, best_R, mask=r_R < R)
    tl.store(chunk_ptr + at_R, chunk_R, mask=r_R < R)


@triton.jit
def approx_kernel(
    q_ptr, mean_ptr, length_ptr, score_ptr, chunk_ptr,
    ROWS: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As every_key_kernel, by q . mean key from the table mean [B, ROWS, G, K], in fp32 throughout."""
    pid = tl.program_id(0)
    h = pid % H
    split = pid // H % SPLITS
    b = (pid // H // SPLITS).to(tl.int64)
    begin, end = _share(tl.load(length_ptr + b), C, SPLITS, split)
    d = tl.arange(0, KP)
    q_K = tl.load(q_ptr + (b * H + h) * K + d, mask=d < K, other=0.0).to(tl.float32)
    mean_ptr += b * ROWS * G * K + h // (H // G) * K
    best = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], -1, tl.int32)
    for first in tl.range(begin, end, BLOCK):
        c_C = first + tl.arange(0, BLOCK)
        mean_CK = load_rows(mean_ptr, c_C, G * K, end, K, KP, True)
        score_C = tl.sum(mean_CK.to(tl.float32) * q_K[None, :], 1)
        score_C = tl.where(c_C < end, score_C, float("-inf"))
        top = tl.max(score_C, 0)
        top_chunk = tl.min(tl.where(score_C == top, c_C, ROWS), 0)
        chosen = tl.where(top > best, top_chunk, chosen)
        best = tl.maximum(best, top)
    tl.store(score_ptr + (b * H + h) * SPLITS + split, best)
    tl.store(chunk_ptr + (b * H + h) * SPLITS + split, chosen)


@triton.jit
def _visit(
    q_K, k_ptr, v_ptr, m, l, o_V, begin, end,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, LOG2_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys of [begin, end)."""
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
    VP: tl.constexpr, C: tl.constexpr, SPLITS: tl.constexpr, SPLITS_P: tl.constexpr, LOG2_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes o [B, H, V] from the splits' best chunks; in the first chunk no split has one (-1)."""
    pid = tl.program_id(0)
    b, h = (pid // H).to(tl.int64), pid % H
    length = tl.load(length_ptr + b)
    split = tl.arange(0, SPLITS_P)
    at = (b * H + h) * SPLITS + split
    score = tl.load(score_ptr + at, mask=split < SPLITS, other=float("-inf"))
    chunk = tl.load(chunk_ptr + at, mask=split < SPLITS, other=-1)
    # chunks ascend with the split, so among equal scores the smallest chunk is the first split's
    is_best = (score == tl.max(score, 0)) & (chunk >= 0)
    selected = tl.min(tl.where(is_best, chunk, S), 0)
    d = tl.arange(0, KP)
    q_K = tl.load(q_ptr + (b * H + h) * K + d, mask=d < K, other=0.0).to(tl.float32)
    g = h // (H // G)
    k_ptr += b * S * G * K + g * K
    v_ptr += b * S * G * V + g * V
    own = (length - 1) // C * C
    # the newest key is always there: no softmax over nothing, and m is finite before the remote chunk is read
    m, l, o_V = _visit(
        q_K, k_ptr, v_ptr, tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32),
        tl.zeros([VP], tl.float32), own, length, G, K, V, KP, VP, LOG2_SCALE, BLOCK,
    )  # fmt: skip
    # NaN queries select nothing; they read chunk 0 then, and not what lies beyond the cache
    remote = tl.where((own > 0) & (selected < S), selected * C, 0)
    m, l, o_V = _visit(
        q_K, k_ptr, v_ptr, m, l, o_V, remote, tl.where(own > 0, remote + C, 0),
        G, K, V, KP, VP, LOG2_SCALE, BLOCK,
    )  # fmt: skip
    e = tl.arange(0, VP)
    tl.store(o_ptr + (b * H + h) * V + e, (o_V / l).to(o_ptr.dtype.element_ty), mask=e < V)
