"""Parts of the inverse of a unit lower triangular matrix, which recurrences with a correction need for every chunk.

The matrix I + A has blocks of SOLVE rows. Those of the inverse on the diagonal are made by substitution, the others
from them. Products of float32 in three parts, whatever the inputs: where the keys of a delta rule are much alike and
beta is near 2, one TF32 product loses a tenth of X, which alternates between +-2 (for beta up to 1 it loses less than
the rounding of X to bf16). A program has one warp, so that no step of the substitution waits for another.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import store_tile

SOLVE = tl.constexpr(16)  # rows of a block


@triton.jit
def eliminated(x_RR, a_RR, r):
    """`x_RR` without what its rows behind r owe to row r: a step of forward substitution.

    Column and row stay where their sums leave them, so nothing is moved between the threads but for the sums.
    """
    is_r_R = tl.arange(0, SOLVE) == r
    column_R = tl.sum(tl.where(is_r_R[None, :], a_RR, 0.0), 1)
    row_R = tl.sum(tl.where(is_r_R[:, None], x_RR, 0.0), 0)
    return x_RR - column_R[:, None] * row_R[None, :]


@triton.jit
def unit_inverses(a0_RR, a1_RR, a2_RR, a3_RR, N: tl.constexpr):
    """(I + A)^{-1} of N = 1, 2 or 4 strictly lower [SOLVE, SOLVE] A, by forward substitution.

    Each step waits for the one before, so those of all blocks are taken side by side. The first N count.
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
    """Of two float32 matrices, in three parts."""
    return tl.dot(a_RR, b_RR, input_precision="tf32x3")


@triton.jit
def third_and_fourth_rows(x00_RR, x10_RR, x11_RR, x22_RR, x33_RR, a20_RR, a21_RR, a30_RR, a31_RR, a32_RR):
    """Of an inverse of four blocks a side those left of the diagonal, in the order of reading.

    X_rc = -X_rr sum_{c <= m < r} A_rm X_mc, blocks nearer to the diagonal first.
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
    """Row R of the blocks of an inverse [C, C], those of x up to the diagonal and zeros behind it."""
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
