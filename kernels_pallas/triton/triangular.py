"""Invert I + A, A strictly lower triangular: device functions.

Delta-rule recurrences need X = (I + A)^{-1} for every chunk. I + A is cut into SOLVE x SOLVE blocks. Forward
substitution gives X's diagonal blocks; products give the blocks below the diagonal:

    X_rc = -X_rr sum_{c <= m < r} A_rm X_mc

A program has one warp, so no substitution step waits for another warp. Float32 products use three TF32 products for any
input dtype. With similar keys and beta near 2, X alternates between +-2, and a single TF32 product loses a tenth of it.
(For beta up to 1 it loses less than rounding X to bf16 does.)
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import store_tile

SOLVE = tl.constexpr(16)  # rows per block


@triton.jit
def eliminated(x_RR, a_RR, r):
    """Return `x_RR` after one step of forward substitution.

    The step eliminates row r from the rows after it. Column and row stay in the layout of their sums, so only the sums
    move data between threads.
    """
    is_r_R = tl.arange(0, SOLVE) == r
    column_R = tl.sum(tl.where(is_r_R[None, :], a_RR, 0.0), 1)
    row_R = tl.sum(tl.where(is_r_R[:, None], x_RR, 0.0), 0)
    return x_RR - column_R[:, None] * row_R[None, :]


@triton.jit
def unit_inverses(a0_RR, a1_RR, a2_RR, a3_RR, N: tl.constexpr):
    """Return (I + A)^{-1} of N = 1, 2 or 4 blocks A, by forward substitution.

    The blocks are strictly lower triangular, [SOLVE, SOLVE]. Each step depends on the previous step, so the steps of
    all blocks are interleaved. Only the first N results count.
    """
    i = tl.arange(0, SOLVE)
    x0_RR = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    x1_RR, x2_RR, x3_RR = x0_RR, x0_RR, x0_RR
    for r in range(SOLVE - 1):
        x0_RR = eliminated(x0_RR, a0_RR, r)
        if N > 1:
            x1_RR = eliminated(x1_RR, a1_RR, r)
        if N > 2:
            x2_RR = eliminated(x2_RR, a2_RR, r)
            x3_RR = eliminated(x3_RR, a3_RR, r)
    return x0_RR, x1_RR, x2_RR, x3_RR


@triton.jit
def product(a_RR, b_RR):
    """Return the product of two float32 matrices, as three TF32 products."""
    return tl.dot(a_RR, b_RR, input_precision="tf32x3")


@triton.jit
def third_and_fourth_rows(x00_RR, x10_RR, x11_RR, x22_RR, x33_RR, a20_RR, a21_RR, a30_RR, a31_RR, a32_RR):
    """Return a 4 x 4 block inverse's off-diagonal blocks in rows 2 and 3.

    They are left of the diagonal, in reading order. Blocks nearer to the diagonal are computed first.
    """
    x21_RR = -product(x22_RR, product(a21_RR, x11_RR))
    x20_RR = -product(x22_RR, product(a20_RR, x00_RR) + product(a21_RR, x10_RR))
    x32_RR = -product(x33_RR, product(a32_RR, x22_RR))
    x31_RR = -product(x33_RR, product(a31_RR, x11_RR) + product(a32_RR, x21_RR))
    x30_RR = -product(x33_RR, product(a30_RR, x00_RR) + product(a31_RR, x10_RR) + product(a32_RR, x20_RR))
    return x20_RR, x21_RR, x30_RR, x31_RR, x32_RR


@triton.jit
def store_row(
    out, row, stride: tl.constexpr, T: tl.constexpr, C: tl.constexpr, R: tl.constexpr, x0_RR, x1_RR, x2_RR, x3_RR
):
    """Write block row R of an inverse [C, C].

    Writes the blocks x0 to x3 up to the diagonal, and zeros after it.
    """
    i = tl.arange(0, SOLVE)
    row += R * SOLVE
    store_tile(out, row, i, stride, 1, T, C, x0_RR)
    if R > 0:
        store_tile(out, row, i + SOLVE, stride, 1, T, C, x1_RR)
    if R > 1:
        store_tile(out, row, i + 2 * SOLVE, stride, 1, T, C, x2_RR)
    if R > 2:
        store_tile(out, row, i + 3 * SOLVE, stride, 1, T, C, x3_RR)
    for column in range(R + 1, C // SOLVE):
        store_tile(out, row, i + column * SOLVE, stride, 1, T, C, tl.zeros([SOLVE, SOLVE], tl.float32))
