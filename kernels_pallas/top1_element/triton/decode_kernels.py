"""Triton kernels of Top-1 Element decoding: best key per split, then the value.

    kernel                    one program per           writes
    best_key_of_split_kernel  key-value head and split  score, index, for each query head of the group
    value_kernel              query head                o

    operand       shape           dtype
    q             [B, H, K]       bf16, fp16 or fp32
    k cache       [B, S, G, K]    as q
    v cache       [B, S, G, V]    as q
    length        [B]             int32
    score, index  [B, H, splits]  fp32 and int32: the largest q . k of a split, and its first key
    o             [B, H, V]       v's dtype

A split is a share of the keys up to `length`, so a few sequences fill the GPU and unused cache is not read. Source:
arXiv 2505.18522, Top-1 Element.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import load_rows


@triton.jit
def best_key_of_split_kernel(
    q_ptr, k_ptr, length_ptr, score_ptr, index_ptr,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write each split's largest q . k and its first key, both [B, H, splits]."""
    R: tl.constexpr = H // G
    pid = tl.program_id(0)
    g = pid % G  # neighbours read the same tokens; a token's heads are contiguous
    split = pid // G % SPLITS
    b = (pid // G // SPLITS).to(tl.int64)
    length = tl.load(length_ptr + b)
    each = ((length + BLOCK - 1) // BLOCK + SPLITS - 1) // SPLITS * BLOCK
    begin = split * each
    r_R = tl.arange(0, RP)
    q_RK = load_rows(q_ptr + (b * H + g * R) * K, r_R, K, R, K, KP, True)
    k_ptr += b * S * G * K + g * K
    best_R = tl.full([RP], float("-inf"), tl.float32)
    index_R = tl.full([RP], 0, tl.int32)
    for first in tl.range(begin, tl.minimum(begin + each, length), BLOCK):
        s_S = first + tl.arange(0, BLOCK)
        k_SK = load_rows(k_ptr, s_S, G * K, length, K, KP, True)
        score_RS = tl.dot(q_RK, tl.trans(k_SK), input_precision=PRECISION)
        score_RS = tl.where((s_S < length)[None, :], score_RS, float("-inf"))
        top_R = tl.max(score_RS, 1)
        key_R = tl.min(tl.where(score_RS == top_R[:, None], s_S[None, :], S), 1)
        index_R = tl.where(top_R > best_R, key_R, index_R)
        best_R = tl.maximum(best_R, top_R)
    at_R = (b * H + g * R + r_R) * SPLITS + split
    tl.store(score_ptr + at_R, best_R, mask=r_R < R)
    tl.store(index_ptr + at_R, index_R, mask=r_R < R)


@triton.jit
def value_kernel(
    v_ptr, score_ptr, index_ptr, o_ptr,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_P: tl.constexpr,
):  # fmt: skip
    """Write o [B, H, V], the value of the best key.

    Keys ascend with the split, so ties go to the earliest key.
    """
    pid = tl.program_id(0)
    b, h = (pid // H).to(tl.int64), pid % H
    split = tl.arange(0, SPLITS_P)
    score = tl.load(score_ptr + pid * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    index = tl.load(index_ptr + pid * SPLITS + split, mask=split < SPLITS, other=S - 1)
    is_best = (score == tl.max(score, 0)) & (split < SPLITS)
    key = tl.min(tl.where(is_best, index, S - 1), 0)
    e = tl.arange(0, VP)
    o_V = tl.load(v_ptr + (b * S * G + key * G + h // (H // G)) * V + e, mask=e < V, other=0.0)
    tl.store(o_ptr + pid * V + e, o_V, mask=e < V)
