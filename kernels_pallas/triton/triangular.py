"""Inverses of unit lower triangular matrices, which recurrences with a correction need: of a block, and of a tile."""

import triton
import triton.language as tl

SOLVE = tl.constexpr(16)  # rows of a block of the inverse that forward substitution makes


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
def unit_lower_inverse(a_CC, C: tl.constexpr):
    """(I + A)^{-1} of a strictly lower triangular A [C, C] in float32, C up to 64.

    Blocks of SOLVE rows on the diagonal by forward substitution, row r of all of them at a time; then pairs of blocks
    are merged: with L what A has between both, and X block diagonal, X - X L X is the inverse of the pair. Products of
    float32 in three parts, whatever the inputs: where the keys of a delta rule are much alike and beta is near 2, one
    TF32 product loses a tenth of X, which alternates between +-2 (for beta up to 1 it loses less than the rounding of X
    to bf16).
    """
    i = tl.arange(0, C)
    later, earlier = i[:, None], i[None, :]
    is_own_CC = later // SOLVE == earlier // SOLVE
    x_CC = tl.where(is_own_CC, -a_CC, 0.0)
    for r in range(2, SOLVE):
        # Row r of a block is still that of -A: its entry of column l, by l, times row l of X, which is done for l < r.
        is_row_C1 = later % SOLVE == r
        factors_C = tl.sum(tl.where(is_row_C1, x_CC, 0.0), 0)
        add_C = tl.sum(factors_C[:, None] * x_CC, 0)
        x_CC += tl.where(is_row_C1 & is_own_CC, add_C[None, :], 0.0)
    x_CC += tl.where(later == earlier, 1.0, 0.0)
    if C > SOLVE:
        is_pair_CC = later // (2 * SOLVE) == earlier // (2 * SOLVE)
        low_CC = tl.where(is_pair_CC & (later // SOLVE != earlier // SOLVE), a_CC, 0.0)
        product_CC = product(x_CC, low_CC)
        x_CC -= product(product_CC, x_CC)
    if C > 2 * SOLVE:
        low_CC = tl.where(later // (2 * SOLVE) != earlier // (2 * SOLVE), a_CC, 0.0)
        product_CC = product(x_CC, low_CC)
        x_CC -= product(product_CC, x_CC)
    return x_CC
