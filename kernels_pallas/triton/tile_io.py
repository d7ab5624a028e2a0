"""Load and store tiles of `[..., rows, heads, dim]` arrays: device functions.

A tile of rows is [rows, DP]: the dim D is padded to DP, a power of two and at least 16, as the matrix units require.
Padding is read as zero and not written. `load_tile` and `store_tile` take any two axes, in either order;
`load_transposed` and `store_transposed` are faster for rows of a matrix that become columns of a tile. Offsets within
a batch entry are int32; the entry's base offset is int64.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)  # converts base-2 logarithms to natural ones when a kernel returns them
LOG2_E = tl.constexpr(1.4426950408889634)  # converts natural logarithms to base 2: exp2 is one instruction, exp five


@triton.jit
def load_rows(ptr, row_R, stride: tl.constexpr, n_rows, D: tl.constexpr, DP: tl.constexpr, BOUNDED: tl.constexpr):
    """Return [R, DP]: the rows `row_R` (D entries), `stride` apart.

    When BOUNDED, rows from `n_rows` on are zeros.
    """
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
    """Write [R, DP] to rows `row_R`.

    Omits the padding and the rows from `n_rows` on.
    """
    d = tl.arange(0, DP)
    mask = (row_R < n_rows)[:, None] & (d < D)[None, :]
    tl.store(ptr + row_R[:, None] * stride + d[None, :], x_RD.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def place_of(pid, T: tl.constexpr, H: tl.constexpr, C: tl.constexpr):
    """Return the program's (batch entry, head, first position, index into [B, c, H]).

    For kernels with one program per chunk and head.
    """
    n_chunks: tl.constexpr = (T + C - 1) // C
    h, chunk, b = pid % H, pid // H % n_chunks, (pid // (H * n_chunks)).to(tl.int64)
    return b, h, chunk * C, (b * n_chunks + chunk) * H + h


@triton.jit
def load_tile(
    ptr, r, c, stride_r: tl.constexpr, stride_c: tl.constexpr, n_r: tl.constexpr, n_c: tl.constexpr,
    BOUND_R: tl.constexpr, BOUND_C: tl.constexpr,
):  # fmt: skip
    """Return a tile [r, c] of a matrix with these strides.

    Where bounded, entries from n_r and n_c on are zeros.
    """
    ptrs = ptr + r[:, None] * stride_r + c[None, :] * stride_c
    if BOUND_R and BOUND_C:
        return tl.load(ptrs, mask=(r < n_r)[:, None] & (c < n_c)[None, :], other=0.0)
    if BOUND_R:
        return tl.load(ptrs, mask=(r < n_r)[:, None], other=0.0)
    if BOUND_C:
        return tl.load(ptrs, mask=(c < n_c)[None, :], other=0.0)
    return tl.load(ptrs)


@triton.jit
def store_tile(ptr, r, c, stride_r: tl.constexpr, stride_c: tl.constexpr, n_r: tl.constexpr, n_c: tl.constexpr, x):
    """Write a tile at the positions that `load_tile` reads."""
    ptrs = ptr + r[:, None] * stride_r + c[None, :] * stride_c
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(r < n_r)[:, None] & (c < n_c)[None, :])


@triton.jit
def transposed_tile(
    r, c, stride_c: tl.constexpr, n_r: tl.constexpr, n_c, R: tl.constexpr, N: tl.constexpr,
    BOUND_R: tl.constexpr, BOUND_C: tl.constexpr,
):  # fmt: skip
    """Return offsets and mask of a transposed tile: entries r to r + R of the rows c to c + N of a matrix.

    Their shape is [16, R / 16, N / 16, 16]: row within 16, entry by 16, row by 16, entry within 16. Triton then gives
    each of four warps 16 of 64 entries, as wgmma does, and tiles move between its layout and memory without a barrier.
    """
    at_r = r + 16 * tl.arange(0, R // 16)[None, :, None, None] + tl.arange(0, 16)[None, None, None, :]
    at_c = c + tl.arange(0, 16)[:, None, None, None] + 16 * tl.arange(0, N // 16)[None, None, :, None]
    mask = tl.full([16, R // 16, N // 16, 16], True, tl.int1)
    if BOUND_R:
        mask &= at_r < n_r
    if BOUND_C:
        mask &= at_c < n_c
    return at_c * stride_c + at_r, mask


@triton.jit
def load_transposed(
    ptr, r, c, stride_c: tl.constexpr, n_r: tl.constexpr, n_c, R: tl.constexpr, N: tl.constexpr,
    BOUND_R: tl.constexpr, BOUND_C: tl.constexpr,
):  # fmt: skip
    """Return entries r to r + R of the rows c to c + N of a matrix as [R, N].

    Where bounded, entries from n_r and rows from n_c on are zeros.
    """
    at, mask = transposed_tile(r, c, stride_c, n_r, n_c, R, N, BOUND_R, BOUND_C)
    return tl.reshape(tl.permute(tl.load(ptr + at, mask=mask, other=0.0), [1, 3, 2, 0]), [R, N])


@triton.jit
def store_transposed(
    ptr, r, c, stride_c: tl.constexpr, n_r: tl.constexpr, n_c, R: tl.constexpr, N: tl.constexpr,
    BOUND_R: tl.constexpr, BOUND_C: tl.constexpr, x_RN,
):  # fmt: skip
    """Write [R, N] at the positions that `load_transposed` reads."""
    at, mask = transposed_tile(r, c, stride_c, n_r, n_c, R, N, BOUND_R, BOUND_C)
    x = tl.reshape(x_RN.to(ptr.dtype.element_ty), [R // 16, 16, N // 16, 16])
    tl.store(ptr + at, tl.permute(x, [3, 0, 2, 1]), mask=mask)


@triton.jit
def powers_of_two(x_RD):
    """Return the power of two of the largest |entry| per row, at most that entry, and its inverse, [R].

    Rows times this inverse have entries below 2 and keep all bits. In fp16 they are as precise as in TF32.
    """
    most_R = tl.maximum(tl.max(tl.abs(x_RD), 1), 1e-30)
    bits_R = most_R.to(tl.int32, bitcast=True) & 0x7F800000
    return bits_R.to(tl.float32, bitcast=True), (0x7F000000 - bits_R).to(tl.float32, bitcast=True)
