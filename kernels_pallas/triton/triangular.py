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
def unit_inverse(a_RR):
    """(I + A)^{-1} of a strictly lower [SOLVE, SOLVE] A, by forward substitution."""
    i = tl.arange(0, SOLVE)
    x_RR = -a_RR
    for r in range(2, SOLVE):
        # Row r is still that of -A: its entry of column l, by l, times row l of the inverse, which is done for l < r.
        is_row_R1 = (i == r)[:, None]
        factors_R = tl.sum(tl.where(is_row_R1, x_RR, 0.0), 0)
        x_RR += tl.where(is_row_R1, tl.sum(factors_R[:, None] * x_RR, 0)[None, :], 0.0)
    return x_RR + tl.where(i[:, None] == i[None, :], 1.0, 0.0)


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
