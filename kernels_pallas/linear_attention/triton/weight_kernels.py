"""Device functions for key-channel decays: sums of log w, weights and scores.

    S_t = diag(w_t) S_{t-1} + k_t v_t^T,  0 < w <= 1;   keys k write, queries q read

Let g be the running sum of log2 w from the chunk start. Base 2 is used because exp2 is one instruction and exp is five.

    writer at position j    weight 2^{-g_j}
    reader at position i    weight 2^{g_i}, or 2^{g_{i-1}} if it reads BEFORE its decay (never set for a writer)

Only the product of both weights is bounded. Each reader channel therefore takes one of two paths:

    near   g >= -BOUND, the common case. One product with these weights; earlier writers have at most 2^BOUND.
    far    g < -BOUND. The chunk is halved down to single positions. For pairs in different halves of a block, sums are
           relative to the end of the first half, which lies between writer and reader: both weights are at most 1.

Blocks of equal size share one masked product. A reader channel has weight 0 on the path that it does not take, and
scores need no mask for this. A reader's result does not depend on later positions, bit for bit. Positions are [C, 1] or
[1, C] and key channels the other way round, so weights have the orientation that a product needs.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import load_tile

# In float32, 2^-86 is far above the smallest normal number (2^-126), and 2^86 leaves 2^41 for values and sums.
BOUND = tl.constexpr(86.0)


@triton.jit
def load_sums(g_ptr, position, key, stride: tl.constexpr, K: tl.constexpr, BEFORE: tl.constexpr):
    """Return the sums g at (or BEFORE) positions of the chunk at `g_ptr`.

    Zero before the chunk and for key channels from K on. g is padded to whole chunks.
    """
    if BEFORE:
        position -= 1
    return tl.load(g_ptr + position * stride + key, mask=(position >= 0) & (key < K), other=0.0)


@triton.jit
def from_start(sums, READS: tl.constexpr, FAR: tl.constexpr):
    """Return reader or writer weights relative to the chunk start.

    Readers below -BOUND get 0. Without FAR, the caller guarantees that no sum is below -BOUND.
    """
    if not FAR:
        return tl.exp2(sums if READS else -sums)
    if READS:
        return tl.where(sums >= -BOUND, tl.exp2(sums), 0.0)
    return tl.exp2(tl.minimum(-sums, BOUND))


@triton.jit
def from_middle(g_ptr, sums, position, key, half, stride: tl.constexpr, K: tl.constexpr, READS: tl.constexpr):
    """Return weights relative to the middle of blocks of 2 * half positions.

    Zero for writers after the middle, for readers up to it, and for reader channels that `from_start` covers.
    """
    middle = (position | (2 * half - 1)) - half
    distance = sums - load_sums(g_ptr, middle, key, stride, K, False)
    is_late = (position & half) != 0
    if READS:
        return tl.exp2(tl.where(is_late & (sums < -BOUND), distance, float("-inf")))
    return tl.exp2(tl.where(is_late, float("-inf"), -distance))


@triton.jit
def in_same_block(row, column, half):
    """Return whether row and column lie in the same block of 2 * half positions."""
    return (row | (2 * half - 1)) == (column | (2 * half - 1))


@triton.jit
def halvings_of(sums, C: tl.constexpr):
    """Return how often a chunk with these reader sums must be halved; C is 16, 32 or 64."""
    return tl.where(tl.min(tl.min(sums, 1), 0) >= -BOUND, 0, 6 if C == 64 else 5 if C == 32 else 4)


@triton.jit
def scores(
    x_ptr, y_ptr, g_ptr, start,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    READS: tl.constexpr, X_BEFORE: tl.constexpr, Y_BEFORE: tl.constexpr, MILD: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return sum_n x_in y_jn 2^{g_reader,n - g_writer,n} of a chunk, [C, C], without the diagonal.

    With READS x is the reader and y the writer, otherwise the reverse. Key channels are read in blocks of KEYS. MILD
    means that no sum is below -BOUND, BOUNDED that the last chunk is incomplete. x_ptr and y_ptr point to the head,
    g_ptr to the chunk.
    """
    n_blocks: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = K % KEYS != 0
    i = tl.arange(0, C)
    is_pair_CC = i[None, :] < i[:, None] if READS else i[:, None] < i[None, :]
    a_CC = tl.zeros([C, C], tl.float32)
    for block in range(n_blocks):
        at_K = block * KEYS + tl.arange(0, KEYS)
        x_CK = load_tile(x_ptr, start + i, at_K, H * K, 1, T, K, BOUNDED, PART)
        y_KC = load_tile(y_ptr, at_K, start + i, 1, H * K, K, T, PART, BOUNDED)
        x_sums_CK = load_sums(g_ptr, i[:, None], at_K[None, :], H * K, K, X_BEFORE)
        y_sums_KC = load_sums(g_ptr, i[None, :], at_K[:, None], H * K, K, Y_BEFORE)
        halvings = 0 if MILD else halvings_of(x_sums_CK if READS else y_sums_KC, C)
        left_CK = (x_CK * from_start(x_sums_CK, READS, not MILD)).to(x_CK.dtype)
        right_KC = (y_KC * from_start(y_sums_KC, not READS, not MILD)).to(x_CK.dtype)
        a_CC = tl.where(is_pair_CC, tl.dot(left_CK, right_KC, a_CC, input_precision=PRECISION), 0.0)
        half = halvings * 0 + C // 2
        for _ in range(halvings):
            by_CK = from_middle(g_ptr, x_sums_CK, i[:, None], at_K[None, :], half, H * K, K, READS)
            by_KC = from_middle(g_ptr, y_sums_KC, i[None, :], at_K[:, None], half, H * K, K, not READS)
            left_CK, right_KC = (x_CK * by_CK).to(x_CK.dtype), (y_KC * by_KC).to(x_CK.dtype)
            product_CC = tl.dot(left_CK, right_KC, input_precision=PRECISION)
            a_CC += tl.where(in_same_block(i[:, None], i[None, :], half), product_CC, 0.0)
            half = half >> 1
    return a_CC


@triton.jit
def with_diagonal(
    a_CC, x_ptr, y_ptr, u_ptr, start,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr, BONUS: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Return `a_CC` with diagonal x_i . y_i, or x_i . (u y_i) with BONUS."""
    n_blocks: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = K % KEYS != 0
    i = tl.arange(0, C)
    diagonal_C = tl.zeros([C], tl.float32)
    for block in range(n_blocks):
        at_K = block * KEYS + tl.arange(0, KEYS)
        x_CK = load_tile(x_ptr, start + i, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
        y_CK = load_tile(y_ptr, start + i, at_K, H * K, 1, T, K, BOUNDED, PART).to(tl.float32)
        if BONUS:
            y_CK *= tl.load(u_ptr + at_K, mask=at_K < K, other=0.0)[None, :]
        diagonal_C += tl.sum(x_CK * y_CK, 1)
    return tl.where(i[:, None] == i[None, :], diagonal_C[:, None], a_CC)
