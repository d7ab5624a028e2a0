"""Triton kernels for linear attention's low-rank part: corrections U and dY.

    U = X (a|k) V + X a~ S,   dY = X^T (r|b)^T dO + X^T b^ L,   X = (I - a|b)^{-1}

    kernel   writes                    shape and dtype
    pairs    a|b                       [B, T, H, C] fp32
    solve    X                         [B, T, H, C] input
    mix      X (a|k) V and X a~        [B, T, H, V] and [B, T, H, K] input
    mix      X^T (r|b)^T dO and X^T b^, with REVERSE; same shapes

One program handles one chunk of one head, and all chunks run in parallel. Only one product per chunk must then wait for
the state, in `state` (kernels.py). `pairs` and `solve` are separate, because `solve` inverts blocks of 16 with one
warp: together they took 0.32 ms for an RWKV-7 layer on one H200, a single kernel 0.69 ms (lab/log/kernels.md). If b is
k, as in KDA, only `solve` is used (tied_kernels.py). Operands and flags: kernels.py.
"""

import triton
import triton.language as tl

from kernels_pallas.linear_attention.triton.weight_kernels import load_sums, scores, with_diagonal
from kernels_pallas.triton.tile_io import load_tile, place_of, store_tile
from kernels_pallas.triton.triangular import SOLVE, product, store_row, third_and_fourth_rows, unit_inverses


@triton.jit
def pairs_kernel(
    a_ptr, b_ptr, g_ptr, pairs_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr, MILD: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a|b for a chunk and head: rows of [B, T, H, C] in float32."""
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i = tl.arange(0, C)
    in_K = b * T * H * K + h * K
    in_g = g_ptr + head // H * (C * H * K) + h * K
    m_CC = scores(
        a_ptr + in_K, b_ptr + in_K, in_g, start, T, H, K, KEYS, C, True, True, False, MILD, BOUNDED, PRECISION
    )
    store_tile(pairs_ptr + (b * T * H + h) * C, start + i, i, H * C, 1, T, C, m_CC)


@triton.jit
def solve_kernel(pairs_ptr, x_ptr, T: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BOUNDED: tl.constexpr):
    """Compute X = (I - a|b)^{-1} for a chunk and head from a|b.

    Method: `triton/triangular.py`.
    """
    b, h, start, _ = place_of(tl.program_id(0), T, H, C)
    i = tl.arange(0, SOLVE)
    in_pairs, out = pairs_ptr + (b * T * H + h) * C, x_ptr + (b * T * H + h) * C
    row = start + i
    a00_RR = block(in_pairs, row, 0, 0, T, H, C, BOUNDED)
    a11_RR, a22_RR, a33_RR = a00_RR, a00_RR, a00_RR
    if C > SOLVE:
        a11_RR = block(in_pairs, row, 1, 1, T, H, C, BOUNDED)
    if C > 2 * SOLVE:
        a22_RR, a33_RR = block(in_pairs, row, 2, 2, T, H, C, BOUNDED), block(in_pairs, row, 3, 3, T, H, C, BOUNDED)
    x00_RR, x11_RR, x22_RR, x33_RR = unit_inverses(a00_RR, a11_RR, a22_RR, a33_RR, C // SOLVE)
    store_row(out, row, H * C, T, C, 0, x00_RR, x00_RR, x00_RR, x00_RR)
    if C > SOLVE:
        x10_RR = -product(x11_RR, product(block(in_pairs, row, 1, 0, T, H, C, BOUNDED), x00_RR))
        store_row(out, row, H * C, T, C, 1, x10_RR, x11_RR, x11_RR, x11_RR)
    if C > 2 * SOLVE:
        a20_RR = block(in_pairs, row, 2, 0, T, H, C, BOUNDED)
        a21_RR = block(in_pairs, row, 2, 1, T, H, C, BOUNDED)
        a30_RR = block(in_pairs, row, 3, 0, T, H, C, BOUNDED)
        a31_RR = block(in_pairs, row, 3, 1, T, H, C, BOUNDED)
        a32_RR = block(in_pairs, row, 3, 2, T, H, C, BOUNDED)
        x20_RR, x21_RR, x30_RR, x31_RR, x32_RR = third_and_fourth_rows(
            x00_RR, x10_RR, x11_RR, x22_RR, x33_RR, a20_RR, a21_RR, a30_RR, a31_RR, a32_RR
        )
        store_row(out, row, H * C, T, C, 2, x20_RR, x21_RR, x22_RR, x22_RR)
        store_row(out, row, H * C, T, C, 3, x30_RR, x31_RR, x32_RR, x33_RR)


@triton.jit
def block(in_pairs, row, r: tl.constexpr, c: tl.constexpr, T: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
          BOUNDED: tl.constexpr):  # fmt: skip
    """Return a SOLVE x SOLVE block of -(a|b); r and c count blocks."""
    i = tl.arange(0, SOLVE)
    return -load_tile(in_pairs, row + r * SOLVE, i + c * SOLVE, H * C, 1, T, C, BOUNDED, False)


@triton.jit
def mix_kernel(
    inverse_ptr, x_ptr, y_ptr, z_ptr, g_ptr, z_mixed_ptr, x_mixed_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, MILD: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute X (a|k) V and X a~ for a chunk and head.

    x is a, y is k, z is v. In REVERSE, X^T (r|b)^T dO and X^T b^: x is b, y is r, z is do.
    """
    n_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    n_keys: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = V % BLOCK != 0
    PART_K: tl.constexpr = K % KEYS != 0
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i = tl.arange(0, C)
    row = start + i
    in_K, in_V = b * T * H * K + h * K, b * T * H * V + h * V
    in_g = g_ptr + head // H * (C * H * K) + h * K
    dtype = x_ptr.dtype.element_ty
    if REVERSE:
        inverse_CC = load_tile(inverse_ptr + (b * T * H + h) * C, i, row, 1, H * C, C, T, False, BOUNDED)
    else:
        inverse_CC = load_tile(inverse_ptr + (b * T * H + h) * C, row, i, H * C, 1, T, C, BOUNDED, False)
    m_CC = scores(
        x_ptr + in_K, y_ptr + in_K, in_g, start, T, H, K, KEYS, C, not REVERSE, not REVERSE, False, MILD, BOUNDED,
        PRECISION,
    )  # fmt: skip
    if REVERSE:
        m_CC = with_diagonal(m_CC, x_ptr + in_K, y_ptr + in_K, x_ptr, start, T, H, K, KEYS, C, False, BOUNDED)
    m_CC = m_CC.to(dtype)
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_V = block * BLOCK + tl.arange(0, BLOCK)
        z_CV = load_tile(z_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        z_CV = tl.dot(m_CC, z_CV, input_precision=PRECISION).to(dtype)
        z_CV = tl.dot(inverse_CC, z_CV, input_precision=PRECISION)
        store_tile(z_mixed_ptr + in_V, row, at_V, H * V, 1, T, V, z_CV)
    for keys in tl.range(0, n_keys, num_stages=STAGES):
        at_K = keys * KEYS + tl.arange(0, KEYS)
        x_CK = load_tile(x_ptr + in_K, row, at_K, H * K, 1, T, K, BOUNDED, PART_K)
        sums_CK = load_sums(in_g, i[:, None], at_K[None, :], H * K, K, not REVERSE)
        if REVERSE:
            sums_CK = tl.load(in_g + (C - 1) * H * K + at_K, mask=at_K < K, other=0.0)[None, :] - sums_CK
        x_CK = tl.dot(inverse_CC, (x_CK * tl.exp2(sums_CK)).to(dtype), input_precision=PRECISION)
        store_tile(x_mixed_ptr + in_K, row, at_K, H * K, 1, T, K, x_CK)
