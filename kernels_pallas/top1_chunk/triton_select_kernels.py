"""Triton kernels of chunk selection: the quadratic part of Top-1 Chunk (exact), and its 1 / C approximation.

exact. A program scores a tile of queries against every full past chunk. The mass of a chunk is sum_j 2^(x_ij - r_i) with
x = scale log2(e) q . k and one reference r_i per row, its largest x in chunk 0: chunks are then compared by their sums,
with no maximum per chunk, no rescaling and no logarithm. What loses may underflow. A sum that passes 2^100 would lose
digits or overflow, so such a row sends its tile through `_by_logsumexp`, which takes a maximum per chunk and is
right for any scores; normalised q and k never get there.

The special-function unit makes 16 exponentials per clock and multiprocessor, 1.7 times slower than the matrix units
make the scores (docs/kernels.md). So ASM computes POLY of every 4 exponentials on the fused multiply-add units, by range
reduction and a polynomial of degree 4 (relative error 3e-6), beside the others.

approx. The same loop over the table of chunk means, without exponentials.
"""

import triton
import triton.language as tl

from kernels_pallas.triton_rows import load_rows

_POLYNOMIAL = """
    min.f32 x, {x}, 0f42FC0000;
    max.f32 x, x, 0fC2FC0000;
    add.rn.f32 t, x, 0f4B400000;
    sub.rn.f32 n, t, 0f4B400000;
    sub.rn.f32 x, x, n;
    fma.rn.f32 p, x, 0f3C1D0166, 0f3D64FE23;
    fma.rn.f32 p, p, x, 0f3E7601BC;
    fma.rn.f32 p, p, x, 0f3F317096;
    fma.rn.f32 p, p, x, 0f3F800000;
    mov.b32 i, t;
    shl.b32 i, i, 23;
    mov.b32 j, p;
    add.s32 i, i, j;
    mov.b32 {y}, i;
"""


def _exponentials(poly: int) -> str:
    """PTX for four exponentials to base 2, the first `poly` of them without the special-function unit."""
    lines = "".join(
        _POLYNOMIAL.format(x=f"${i + 4}", y=f"${i}") if i < poly else f"    ex2.approx.ftz.f32 ${i}, ${i + 4};\n"
        for i in range(4)
    )
    return "{\n    .reg .f32 x, t, n, p;\n    .reg .b32 i, j;\n" + lines + "}"


POLY_0, POLY_1, POLY_2 = (tl.constexpr(_exponentials(n)) for n in range(3))


@triton.jit
def _exp2(x, POLY: tl.constexpr):
    """2^x, x at most 126 where it matters; POLY of 4 on the multiply-add units, -1 for Triton's own (interpreter)."""
    if POLY == -1:
        return tl.exp2(x)
    CONSTRAINTS: tl.constexpr = "=f,=f,=f,=f,f,f,f,f"
    if POLY == 1:
        return tl.inline_asm_elementwise(POLY_1, CONSTRAINTS, [x], tl.float32, True, 4)
    if POLY == 2:
        return tl.inline_asm_elementwise(POLY_2, CONSTRAINTS, [x], tl.float32, True, 4)
    return tl.inline_asm_elementwise(POLY_0, CONSTRAINTS, [x], tl.float32, True, 4)


@triton.jit
def _scores(
    q_MK, k_ptr, begin, stop, T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[M, N] unscaled scores of keys begin, begin + 1, ...; -inf from key `stop` on when MASKED."""
    col_N = begin + tl.arange(0, BLOCK_N)
    k_NK = load_rows(k_ptr, col_N, G * K, stop, K, KP, MASKED)
    s_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION)
    if MASKED:
        s_MN = tl.where((col_N < stop)[None, :], s_MN, float("-inf"))
    return s_MN


@triton.jit
def _by_mass(
    q_MK, k_ptr, n_M, ref_M, best_M, sel_M, first, last,
    T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr,
    LOG2_SCALE: tl.constexpr, POLY: tl.constexpr, ALL_PAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Chunks [first, last) compared by sum_j 2^(x - ref); all behind all rows when ALL_PAST."""
    for c in tl.range(first, last):
        mass_M = tl.zeros_like(ref_M)
        for piece in tl.static_range(0, C, BLOCK_N):
            s_MN = _scores(
                q_MK, k_ptr, c * C + piece, c * C + C, T, G, K, KP, BLOCK_N, piece + BLOCK_N > C, PRECISION
            )  # fmt: skip
            mass_M += tl.sum(_exp2(s_MN * LOG2_SCALE - ref_M[:, None], POLY), 1)
        is_better_M = mass_M > best_M
        if not ALL_PAST:
            is_better_M &= c < n_M
        best_M = tl.where(is_better_M, mass_M, best_M)
        sel_M = tl.where(is_better_M, c, sel_M)
    return best_M, sel_M


@triton.jit
def _logsumexp(
    q_MK, k_ptr, c, T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(largest x, log2 of the sum of 2^x) of one chunk, per row."""
    m_M = tl.full([q_MK.shape[0]], float("-inf"), tl.float32)
    l_M = tl.zeros([q_MK.shape[0]], tl.float32)
    for piece in tl.static_range(0, C, BLOCK_N):
        s_MN = _scores(q_MK, k_ptr, c * C + piece, c * C + C, T, G, K, KP, BLOCK_N, piece + BLOCK_N > C, PRECISION)
        x_MN = s_MN * LOG2_SCALE
        new_M = tl.maximum(m_M, tl.max(x_MN, 1))
        l_M = l_M * tl.exp2(m_M - new_M) + tl.sum(tl.exp2(x_MN - new_M[:, None]), 1)
        m_M = new_M
    return m_M, m_M + tl.log2(l_M)


@triton.jit
def _by_logsumexp(
    q_MK, k_ptr, n_M, last,
    T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr,
    LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The selection for any scores: one maximum per chunk, chunks compared by log-sum-exp."""
    best_M = tl.full([q_MK.shape[0]], float("-inf"), tl.float32)
    sel_M = tl.zeros([q_MK.shape[0]], tl.int32)
    for c in tl.range(0, last):
        _, lse_M = _logsumexp(q_MK, k_ptr, c, T, G, K, KP, C, BLOCK_N, LOG2_SCALE, PRECISION)
        is_better_M = (lse_M > best_M) & (c < n_M)
        best_M = tl.where(is_better_M, lse_M, best_M)
        sel_M = tl.where(is_better_M, c, sel_M)
    return sel_M


@triton.jit
def exact_kernel(
    q_ptr, k_ptr, sel_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, POLY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sel [B, T, H] int32. Programs of one head run together (its keys stay in the L2 cache), the longest first."""
    n_tiles: tl.constexpr = (T + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    tile = n_tiles - 1 - pid % n_tiles
    b, h = (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H
    k_ptr += b * T * G * K + h // (H // G) * K
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n_M = row_M // C
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    # chunks before `all_past` lie behind every row, those up to `last` behind some
    all_past = tile * BLOCK_M // C
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, T - 1) // C
    sel_M = tl.zeros([BLOCK_M], tl.int32)
    if last > 0:
        ref_M, lse_M = _logsumexp(q_MK, k_ptr, 0, T, G, K, KP, C, BLOCK_N, LOG2_SCALE, PRECISION)
        # chunk 0 is scored again below, so that its mass is rounded as every other's: ties are exact
        best_M = tl.zeros([BLOCK_M], tl.float32)
        best_M, sel_M = _by_mass(
            q_MK, k_ptr, n_M, ref_M, best_M, sel_M, 0, all_past,
            T, G, K, KP, C, BLOCK_N, LOG2_SCALE, POLY, True, PRECISION,
        )  # fmt: skip
        best_M, sel_M = _by_mass(
            q_MK, k_ptr, n_M, ref_M, best_M, sel_M, all_past, last,
            T, G, K, KP, C, BLOCK_N, LOG2_SCALE, POLY, False, PRECISION,
        )  # fmt: skip
        # not below: NaN counts too. Rows past the end read zeros and have no large score.
        is_large_M = tl.where((best_M < 1.2676506e30) | (n_M == 0), 0, 1)
        if tl.max(is_large_M, 0) > 0:
            sel_M = _by_logsumexp(q_MK, k_ptr, n_M, last, T, G, K, KP, C, BLOCK_N, LOG2_SCALE, PRECISION)
    sel_M = tl.where(n_M == 0, -1, sel_M)
    tl.store(sel_ptr + (b * T + row_M) * H + h, sel_M, mask=row_M < T)


@triton.jit
def approx_kernel(
    q_ptr, mean_ptr, sel_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    N_FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sel [B, T, H] int32 from means [B, T // C, G, K] fp32: argmax of q . mean in nearly fp32 (three TF32 products)."""
    n_tiles: tl.constexpr = (T + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    tile = n_tiles - 1 - pid % n_tiles
    b, h = (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H
    mean_ptr += b * N_FULL * G * K + h // (H // G) * K
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n_M = row_M // C
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True).to(tl.float32)
    best_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sel_M = tl.zeros([BLOCK_M], tl.int32)
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, T - 1) // C
    for start in tl.range(0, last, BLOCK_N):
        chunk_N = start + tl.arange(0, BLOCK_N)
        mean_NK = load_rows(mean_ptr, chunk_N, G * K, N_FULL, K, KP, True)
        s_MN = tl.dot(q_MK, tl.trans(mean_NK), input_precision="tf32x3")
        s_MN = tl.where(chunk_N[None, :] < n_M[:, None], s_MN, float("-inf"))
        top_M, at_M = tl.max(s_MN, 1, return_indices=True, return_indices_tie_break_left=True)
        is_better_M = top_M > best_M
        best_M = tl.where(is_better_M, top_M, best_M)
        sel_M = tl.where(is_better_M, start + at_M, sel_M)
    sel_M = tl.where(n_M == 0, -1, sel_M)
    tl.store(sel_ptr + (b * T + row_M) * H + h, sel_M, mask=row_M < T)
