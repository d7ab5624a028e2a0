"""Device functions for decays per key channel: running sums of log w, weights of readers and writers, score tiles.

With g the running sum of log w from a chunk's start, a writer of position j has e^{-g_j}, a reader of position i
e^{g_i}, or e^{g_{i-1}} if it reads BEFORE its own decay. Only their products are bounded, so both are taken relative to
the sum in the middle of a block that holds i and j. Pairs in different halves of a block have a reader behind the
middle and a writer before it: both weights are at most 1 whatever the decays. A level of halving does these pairs of
all blocks in one masked product; after `levels` of them, blocks are so short that no weight exceeds e^BOUND, and one
more product does all pairs in the same block. The sums kernel counts the levels: there are none where half a chunk
decays by less than e^-BOUND, and never more than until two positions are left.

Positions are [C, 1] or [1, C] and keys the other way, so weights come in the orientation that a product needs.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import load_tile


@triton.jit
def load_sums(g_ptr, position, key, stride: tl.constexpr, K: tl.constexpr, BEFORE: tl.constexpr):
    """g at the positions of a chunk that begins at `g_ptr`, or before them; zeros before the chunk and from K on."""
    if BEFORE:
        position -= 1
    return tl.load(g_ptr + position * stride + key, mask=(position >= 0) & (key < K), other=0.0)


@triton.jit
def weights(g_ptr, sums, position, key, half, is_last, stride: tl.constexpr, K: tl.constexpr, READS: tl.constexpr):
    """Of readers or writers, whose sums are given, relative to the middle of blocks of 2 * half positions.

    0 for writers behind the middle and readers before it, unless `is_last`.
    """
    middle = (position | (2 * half - 1)) - half
    from_middle = sums - load_sums(g_ptr, middle, key, stride, K, False)
    is_late = (position & half) != 0
    if READS:
        return tl.exp(tl.where(is_late | is_last, from_middle, float("-inf")))
    return tl.exp(tl.where(is_late & (is_last == 0), float("-inf"), -from_middle))


@triton.jit
def pairs(row, column, half, ROWS_READ: tl.constexpr):
    """Whether row and column lie in the same block of 2 * half positions, the writer before the reader."""
    is_near = (row | (2 * half - 1)) == (column | (2 * half - 1))
    if ROWS_READ:
        return is_near & (column < row)
    return is_near & (row < column)


@triton.jit
def scores(
    x_ptr, y_ptr, g_ptr, start, levels,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    READS: tl.constexpr, BEFORE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[C, C] without its diagonal: sum_n x_in y_jn e^{...} of a chunk, x the reader and y the writer or, unless READS,
    the other way round. Keys in blocks of KEYS. Pointers are those of the head, g's that of the chunk.
    """
    n_blocks: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = K % KEYS != 0
    X_BEFORE: tl.constexpr = READS and BEFORE
    Y_BEFORE: tl.constexpr = (not READS) and BEFORE
    i = tl.arange(0, C)
    a_CC = tl.zeros([C, C], tl.float32)
    for block in range(0, n_blocks):
        at_K = block * KEYS + tl.arange(0, KEYS)
        x_CK = load_tile(x_ptr, start + i, at_K, H * K, 1, T, K, BOUNDED, PART)
        y_KC = load_tile(y_ptr, at_K, start + i, 1, H * K, K, T, PART, BOUNDED)
        x_sums_CK = load_sums(g_ptr, i[:, None], at_K[None, :], H * K, K, X_BEFORE)
        y_sums_KC = load_sums(g_ptr, i[None, :], at_K[:, None], H * K, K, Y_BEFORE)
        half = levels * 0 + C // 2
        for level in range(0, levels + 1):
            is_last = level == levels
            by_CK = weights(g_ptr, x_sums_CK, i[:, None], at_K[None, :], half, is_last, H * K, K, READS)
            by_KC = weights(g_ptr, y_sums_KC, i[None, :], at_K[:, None], half, is_last, H * K, K, not READS)
            left_CK, right_KC = (x_CK * by_CK).to(x_CK.dtype), (y_KC * by_KC).to(x_CK.dtype)
            product_CC = tl.dot(left_CK, right_KC, input_precision=PRECISION)
            a_CC += tl.where(pairs(i[:, None], i[None, :], half, READS), product_CC, 0.0)
            half = half >> 1
    return a_CC


@triton.jit
def with_diagonal(
    a_CC, x_ptr, y_ptr, u_ptr, start,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr, BONUS: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """`a_CC` with x_i . y_i, or with BONUS x_i . (u y_i), on its diagonal."""
    n_blocks: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = K % KEYS != 0
    i = tl.arange(0, C)
    diagonal_C = tl.zeros([C], tl.float32)
    for block in range(0, n_blocks):
        at_K = block * KEYS + tl.arange(0, KEYS)
        x_CK = load_tile(x_ptr, start + i, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
        y_CK = load_tile(y_ptr, start + i, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
        if BONUS:
            y_CK *= tl.load(u_ptr + at_K, mask=at_K < K, other=0.0)[None, :]
        diagonal_C += tl.sum(x_CK * y_CK, 1)
    return tl.where(i[:, None] == i[None, :], diagonal_C[:, None], a_CC)


@triton.jit
def from_pairs(
    dx_CK, da_CC, y_CK, x_sums_CK, g_ptr, i, at_K, levels,
    stride: tl.constexpr, K: tl.constexpr, C: tl.constexpr, READS: tl.constexpr, Y_BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`dx_CK` and sum_j da_ij y_jn e^{...}: what the gradient of `scores` without diagonal gives x, of some keys."""
    position, key = i[:, None], at_K[None, :]
    y_sums_CK = load_sums(g_ptr, position, key, stride, K, Y_BEFORE)
    half = levels * 0 + C // 2
    for level in range(0, levels + 1):
        is_last = level == levels
        by_x_CK = weights(g_ptr, x_sums_CK, position, key, half, is_last, stride, K, READS)
        by_y_CK = weights(g_ptr, y_sums_CK, position, key, half, is_last, stride, K, not READS)
        near_CC = tl.where(pairs(position, i[None, :], half, READS), da_CC, 0.0).to(y_CK.dtype)
        dx_CK += by_x_CK * tl.dot(near_CC, (y_CK * by_y_CK).to(y_CK.dtype), input_precision=PRECISION)
        half = half >> 1
    return dx_CK
