"""Device functions that the Triton kernels share: tiles of rows in and out of `[..., rows, heads, dim]` arrays.

A tile is [rows, DP], with DP the dim D padded to a power of two of at least 16, as the matrix units require. The
padding reads as zero and is not written. Offsets within one batch entry are int32; its base is int64.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)  # values kept to base 2 leave a kernel to base e


@triton.jit
def load_rows(ptr, row_R, stride: tl.constexpr, n_rows, D: tl.constexpr, DP: tl.constexpr, BOUNDED: tl.constexpr):
    """[R, DP]: rows `row_R` of D entries each, `stride` apart; zeros from row `n_rows` on when BOUNDED."""
    d = tl.arange(0, DP)
    ptrs = ptr + row_R[:, None] * stride + d[None, :]
    if BOUNDED:
        if D == DP:
            return tl.load(ptrs, mask=(row_R < n_rows)[:, None], other=0.0)
        return tl.load(ptrs, mask=(row_R < n_rows)[:, None] & (d < D)[None, :], other=0.0)
    if D == DP:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(d < D)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, row_R, stride: tl.constexpr, n_rows, x_RD, D: tl.constexpr, DP: tl.constexpr):
    """Writes [R, DP] to rows `row_R`, without the padding and the rows from `n_rows` on."""
    d = tl.arange(0, DP)
    mask = (row_R < n_rows)[:, None] & (d < D)[None, :]
    tl.store(ptr + row_R[:, None] * stride + d[None, :], x_RD.to(ptr.dtype.element_ty), mask=mask)
