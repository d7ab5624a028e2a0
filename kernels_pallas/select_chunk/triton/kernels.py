"""Triton kernels of chunk selection: exact, best_key, table scores, shortlist.

    x = scale log2(e) q . k
    exact     mass of a chunk = sum_j 2^(x_ij - r_i); r_i is fixed per row
    best_key  largest score in a chunk; with INT8 the largest integer product times the chunk's step (int8.py)
    table     largest q . row, or x_0 + x_1^2 / 2 (tables.py); approx is the table of chunk means

    kernel           one program per                                writes
    exact_kernel     head and BLOCK_M queries                       sel, by mass
    best_key_kernel  head and BLOCK_M queries                       sel, by largest score, among all chunks or a list
    table_kernel     head and BLOCK_M queries                       sel, by table score
    listed_kernel    segment of rows with the same candidate chunk  top

    operand  shape                           dtype
    q        [B, T, H, K]                    bf16, fp16 or fp32; int8 for best_key_int8
    k        [B, T, G, K]                    as q; for int8 only full chunks, [B, T // C * C, G, K]
    bounded  [B, H]                          int32, whether |x| <= BOUND in the head
    step     [B, T // C, G]                  fp32, the key step of each chunk
    list     [B, T, H, LISTED]               int32, candidates, or -1
    table    [B, PARTS, ROWS, T // C, G, K]  k's dtype; the PARTS add up to fp32 rows
    top      [B, H, T LISTED]                fp32, largest key score; entry t LISTED + j: j-th candidate of query t
    sel      [B, T, H, TOP_K]                int32, padded with -1

exact compares masses directly, without a maximum per chunk, rescaling or logarithms. r_i = 0 if the head is bounded, by
the Cauchy-Schwarz inequality from the largest norms of q and k. Otherwise r_i is the row's largest x in chunk 0, and
small masses may underflow. If a mass exceeds 2^100 (lost digits, overflow), or a mass after the first of TOP_K is below
2^-100, `best_by_logsumexp` computes the tile again; it is right for any scores.

The special-function unit computes 16 exponentials per clock and multiprocessor, and needs 1.7 times as long for them as
the matrix units for the scores. When bounded, some of every 4 exponentials therefore run on the multiply-add units:
range reduction by adding 1.5 * 2^23, and a polynomial of degree 3 (relative error 8e-5, less for a mass). 8-bit
products are twice as fast. Lists of TOP_K chunks stay in registers. A shortlist with many chunks sorts rows by
candidate (triton/sort_plan.py) for listed_kernel; with few chunks best_key_kernel scores all of them. Source: arXiv
2505.18522, Top-1 Chunk (Exact and Approx.).
"""

import struct

import triton
import triton.language as tl

from kernels_pallas.triton.sort_plan_kernels import block_of
from kernels_pallas.triton.tile_io import load_rows

LOWEST = tl.constexpr(-(2**31))
BOUND = 60.0  # 128 * 2^60 stays far below float32's maximum, and the exponent needs no clamp

_POLYNOMIAL = """
    fma.rn.f32 t, {x}, {c}, 0f4B400000;
    sub.rn.f32 n, t, 0f4B400000;
    neg.f32 n, n;
    fma.rn.f32 n, {x}, {c}, n;
    fma.rn.f32 p, n, 0f3D61FBB0, 0f3E786F0D;
    fma.rn.f32 p, p, n, 0f3F31798D;
    fma.rn.f32 p, p, n, 0f3F7FFB49;
    mov.b32 i, t;
    shl.b32 i, i, 23;
    mov.b32 j, p;
    add.s32 i, i, j;
    mov.b32 {y}, i;
"""
_UNIT = """
    mul.rn.f32 t, {x}, {c};
    ex2.approx.ftz.f32 {y}, t;
"""


def exponentials(poly: int, log2_scale: float) -> str:
    """Return PTX that computes 2^(log2_scale s) of four scores.

    The first `poly` of them avoid the special-function unit.
    """
    c = f"0f{struct.unpack('>I', struct.pack('>f', log2_scale))[0]:08X}"
    lines = [(_POLYNOMIAL if i < poly else _UNIT).format(x=f"${i + 4}", y=f"${i}", c=c) for i in range(4)]
    return "{\n    .reg .f32 t, n, p;\n    .reg .b32 i, j;\n" + "".join(lines) + "}"


@triton.jit
def new_lists(lowest_M, NONE: tl.constexpr, TOP_K: tl.constexpr):
    """Return lists (tuples) for the TOP_K best scores and their chunks.

    All entries start with the lowest score and chunk NONE.
    """
    bests, sels = (), ()
    for _rank in tl.static_range(TOP_K):
        bests += (lowest_M,)
        sels += (tl.zeros_like(lowest_M).to(tl.int32) + NONE,)
    return bests, sels


@triton.jit
def inserted(bests, sels, new_M, chunk_M, TOP_K: tl.constexpr):
    """Return the lists with one more score and its chunk.

    The score goes after all equal scores; the last entry is dropped.
    """
    new_bests, new_sels = (), ()
    is_in_M = new_M > bests[0]
    for rank in tl.static_range(TOP_K):
        best_M, sel_M = bests[rank], sels[rank]
        is_in_M |= new_M > best_M  # an entry pushed out of a rank goes before the next entry, even if equal
        new_bests += (tl.where(is_in_M, new_M, best_M),)
        new_sels += (tl.where(is_in_M, chunk_M, sel_M),)
        new_M, chunk_M = tl.where(is_in_M, best_M, new_M), tl.where(is_in_M, sel_M, chunk_M)
    return new_bests, new_sels


@triton.jit
def with_chunk(bests, sels, new_M, c, n_M, ALL_PAST: tl.constexpr, TOP_K: tl.constexpr):
    """Return the lists with chunk c, for rows where c < n_M.

    When ALL_PAST, this holds in all rows.
    """
    if TOP_K == 1:
        is_better_M = new_M > bests[0]
        if not ALL_PAST:
            is_better_M &= c < n_M
        bests, sels = (tl.where(is_better_M, new_M, bests[0]),), (tl.where(is_better_M, c, sels[0]),)
    else:
        if not ALL_PAST:
            new_M = tl.where(c < n_M, new_M, float("-inf"))
        bests, sels = inserted(bests, sels, new_M, c, TOP_K)
    return bests, sels


@triton.jit
def _store_lists(
    sel_ptr, sels, n_M, b, h, row_M, T: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr
):  # fmt: skip
    """Write sel [B, T, H, TOP_K], padded with -1."""
    for rank in tl.static_range(TOP_K):
        sel_M = tl.where(n_M <= rank, -1, sels[rank])
        tl.store(sel_ptr + ((b * T + row_M) * H + h) * TOP_K + rank, sel_M, mask=row_M < T)


@triton.jit
def _bounded_exp2(s, LOG2_SCALE: tl.constexpr, PTX: tl.constexpr):
    """Return 2^(LOG2_SCALE s) for exponents within BOUND.

    Uses PTX unless it is empty (in the interpreter).
    """
    if PTX == "":
        return tl.exp2(s * LOG2_SCALE)
    return tl.inline_asm_elementwise(PTX, "=f,=f,=f,=f,f,f,f,f", [s], tl.float32, True, 4)


@triton.jit
def scores(
    q_MK, k_ptr, begin, stop, T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return [M, N] unscaled scores of keys begin, begin + 1, ...

    When MASKED, scores from key `stop` on are -inf, or LOWEST for integers.
    """
    col_N = begin + tl.arange(0, BLOCK_N)
    k_NK = load_rows(k_ptr, col_N, G * K, stop, K, KP, MASKED)
    s_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION)
    if MASKED:
        lowest = LOWEST if s_MN.dtype == tl.int32 else float("-inf")
        s_MN = tl.where((col_N < stop)[None, :], s_MN, lowest)
    return s_MN


@triton.jit
def _by_mass(
    q_MK, k_ptr, n_M, ref_M, bests, sels, first, last,
    T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr,
    LOG2_SCALE: tl.constexpr, PTX: tl.constexpr, BOUNDED: tl.constexpr, ALL_PAST: tl.constexpr, TOP_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compare chunks [first, last) by sum_j 2^(x - ref).

    ref = 0 when BOUNDED. When ALL_PAST, all chunks precede all rows.
    """
    for c in tl.range(first, last):
        mass_M = tl.zeros_like(ref_M)
        for piece in tl.static_range(0, C, BLOCK_N):
            s_MN = scores(
                q_MK, k_ptr, c * C + piece, c * C + C, T, G, K, KP, BLOCK_N, piece + BLOCK_N > C, PRECISION
            )  # fmt: skip
            if BOUNDED and piece + BLOCK_N <= C:
                p_MN = _bounded_exp2(s_MN, LOG2_SCALE, PTX)
            elif BOUNDED:  # keys past the chunk's end have the score -inf
                p_MN = tl.exp2(s_MN * LOG2_SCALE)
            else:
                p_MN = tl.exp2(s_MN * LOG2_SCALE - ref_M[:, None])
            mass_M += tl.sum(p_MN, 1)
        bests, sels = with_chunk(bests, sels, mass_M, c, n_M, ALL_PAST, TOP_K)
    return bests, sels


@triton.jit
def _logsumexp(
    q_MK, k_ptr, c, T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (largest x, log2 sum_j 2^x_j) per row, for one chunk."""
    m_M = tl.full([q_MK.shape[0]], float("-inf"), tl.float32)
    l_M = tl.zeros([q_MK.shape[0]], tl.float32)
    for piece in tl.static_range(0, C, BLOCK_N):
        s_MN = scores(q_MK, k_ptr, c * C + piece, c * C + C, T, G, K, KP, BLOCK_N, piece + BLOCK_N > C, PRECISION)
        x_MN = s_MN * LOG2_SCALE
        new_M = tl.maximum(m_M, tl.max(x_MN, 1))
        l_M = l_M * tl.exp2(m_M - new_M) + tl.sum(tl.exp2(x_MN - new_M[:, None]), 1)
        m_M = new_M
    return m_M, m_M + tl.log2(l_M)


@triton.jit
def best_by_logsumexp(
    q_MK, k_ptr, n_M, last,
    T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr,
    TOP_K: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the selection for any scores.

    It takes one maximum per chunk and compares chunks by log-sum-exp.
    """
    bests, sels = new_lists(tl.full([q_MK.shape[0]], float("-inf"), tl.float32), 0, TOP_K)
    for c in tl.range(0, last):
        _, lse_M = _logsumexp(q_MK, k_ptr, c, T, G, K, KP, C, BLOCK_N, LOG2_SCALE, PRECISION)
        bests, sels = with_chunk(bests, sels, lse_M, c, n_M, False, TOP_K)
    return sels


@triton.jit
def exact_kernel(
    q_ptr, k_ptr, bounded_ptr, sel_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_SCALE: tl.constexpr, PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write sel [B, T, H, TOP_K] int32 by softmax mass.

    Programs with the same head run together, so its keys stay in the L2 cache; the longest start first.
    """
    n_tiles: tl.constexpr = (T + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    tile = n_tiles - 1 - pid % n_tiles
    b, h = (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H
    k_ptr += b * T * G * K + h // (H // G) * K
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n_M = row_M // C
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    # chunks before `all_past` precede every row, chunks up to `last` precede some rows
    all_past = tile * BLOCK_M // C
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, T - 1) // C
    zero_M = tl.zeros([BLOCK_M], tl.float32)
    bests, sels = new_lists(zero_M, 0, TOP_K)
    if tl.load(bounded_ptr + b * H + h) != 0:
        bests, sels = _by_mass(
            q_MK, k_ptr, n_M, zero_M, bests, sels, 0, all_past,
            T, G, K, KP, C, BLOCK_N, LOG2_SCALE, PTX, True, True, TOP_K, PRECISION,
        )  # fmt: skip
        bests, sels = _by_mass(
            q_MK, k_ptr, n_M, zero_M, bests, sels, all_past, last,
            T, G, K, KP, C, BLOCK_N, LOG2_SCALE, PTX, True, False, TOP_K, PRECISION,
        )  # fmt: skip
    elif last > 0:
        ref_M = _logsumexp(q_MK, k_ptr, 0, T, G, K, KP, C, BLOCK_N, LOG2_SCALE, PRECISION)[0]
        # chunk 0 is scored again below: its mass is then rounded like all masses, and ties are exact
        bests, sels = _by_mass(
            q_MK, k_ptr, n_M, ref_M, bests, sels, 0, last,
            T, G, K, KP, C, BLOCK_N, LOG2_SCALE, PTX, False, False, TOP_K, PRECISION,
        )  # fmt: skip
        # written as "not below", so NaN counts too. Rows past the end read zeros and have no large score.
        is_lost_M = tl.where((bests[0] < 1.2676506e30) | (n_M == 0), 0, 1)
        for rank in tl.static_range(1, TOP_K):  # later entries may be too small
            is_lost_M = tl.where((bests[rank] > 7.8886091e-31) | (n_M <= rank), is_lost_M, 1)
        if tl.max(is_lost_M, 0) > 0:
            sels = best_by_logsumexp(q_MK, k_ptr, n_M, last, T, G, K, KP, C, BLOCK_N, TOP_K, LOG2_SCALE, PRECISION)
    _store_lists(sel_ptr, sels, n_M, b, h, row_M, T, H, TOP_K)


@triton.jit
def _by_best_key(
    q_MK, k_ptr, step_ptr, listed, n_M, bests, sels, first, last,
    T: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr,
    INT8: tl.constexpr, LISTED: tl.constexpr, ALL_PAST: tl.constexpr, TOP_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compare chunks [first, last) by their largest score.

    When ALL_PAST, all chunks precede all rows. With LISTED, a row compares only the chunks in the tuple `listed`.
    """
    for c in tl.range(first, last):
        if INT8:
            top_M = tl.full([q_MK.shape[0]], LOWEST, tl.int32)
        else:
            top_M = tl.full([q_MK.shape[0]], float("-inf"), tl.float32)
        for piece in tl.static_range(0, C, BLOCK_N):
            s_MN = scores(
                q_MK, k_ptr, c * C + piece, c * C + C, T, G, K, KP, BLOCK_N, piece + BLOCK_N > C, PRECISION
            )  # fmt: skip
            top_M = tl.maximum(top_M, tl.max(s_MN, 1))
        if INT8:
            top_M = top_M.to(tl.float32) * tl.load(step_ptr + c * G)
        if LISTED > 0:
            is_listed_M = listed[0] == c
            for rank in tl.static_range(1, LISTED):
                is_listed_M |= listed[rank] == c
            top_M = tl.where(is_listed_M, top_M, float("-inf"))
        bests, sels = with_chunk(bests, sels, top_M, c, n_M, ALL_PAST, TOP_K)
    return bests, sels


@triton.jit
def best_key_kernel(
    q_ptr, k_ptr, step_ptr, list_ptr, sel_ptr,
    T: tl.constexpr, TK: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    C: tl.constexpr, LISTED: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INT8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write sel [B, T, H, TOP_K] int32 by largest score.

    There are TK keys, only of full chunks when INT8. step is read only when INT8. With LISTED, candidates come from
    list [B, T, H, LISTED]. Programs run in the order of `exact_kernel`.
    """
    n_tiles: tl.constexpr = (T + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    tile = n_tiles - 1 - pid % n_tiles
    b, h = (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H
    k_ptr += b * TK * G * K + h // (H // G) * K
    step_ptr += b * (T // C) * G + h // (H // G)
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n_M = row_M // C
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    all_past = tile * BLOCK_M // C
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, T - 1) // C
    listed = ()
    for rank in tl.static_range(LISTED):
        listed += (tl.load(list_ptr + ((b * T + row_M) * H + h) * LISTED + rank, mask=row_M < T, other=-1),)
    bests, sels = new_lists(tl.full([BLOCK_M], float("-inf"), tl.float32), 0, TOP_K)
    bests, sels = _by_best_key(
        q_MK, k_ptr, step_ptr, listed, n_M, bests, sels, 0, all_past,
        T, G, K, KP, C, BLOCK_N, INT8, LISTED, True, TOP_K, PRECISION,
    )  # fmt: skip
    bests, sels = _by_best_key(
        q_MK, k_ptr, step_ptr, listed, n_M, bests, sels, all_past, last,
        T, G, K, KP, C, BLOCK_N, INT8, LISTED, False, TOP_K, PRECISION,
    )  # fmt: skip
    _store_lists(sel_ptr, sels, n_M, b, h, row_M, T, H, TOP_K)


@triton.jit
def row_scores(
    q_MK, row_ptr, chunk_N, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N_FULL: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return [M, N] products of queries with one table row of each chunk.

    The PARTS of this row lie ROWS * N_FULL rows apart.
    """
    x_MN = tl.zeros([q_MK.shape[0], chunk_N.shape[0]], tl.float32)
    for part in tl.static_range(PARTS):  # smallest part first
        at = row_ptr + (PARTS - 1 - part) * ROWS * N_FULL * G * K
        row_NK = load_rows(at, chunk_N, G * K, N_FULL, K, KP, True)
        x_MN = tl.dot(q_MK, tl.trans(row_NK), x_MN, input_precision=PRECISION)
    return x_MN


@triton.jit
def best_by_table(
    q_MK, table_ptr, n_M, last,
    G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N_FULL: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, SQUARED: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the TOP_K chunks before n_M with the largest table scores, as a tuple.

    `table_ptr` points to one head's table [PARTS, ROWS, N_FULL, G, K].
    """
    bests, sels = new_lists(tl.full([q_MK.shape[0]], float("-inf"), tl.float32), 0, TOP_K)
    for start in tl.range(0, last, BLOCK_N):
        chunk_N = start + tl.arange(0, BLOCK_N)
        s_MN = row_scores(q_MK, table_ptr, chunk_N, G, K, KP, N_FULL, PARTS, ROWS, PRECISION)
        if SQUARED:
            x_MN = row_scores(q_MK, table_ptr + N_FULL * G * K, chunk_N, G, K, KP, N_FULL, PARTS, ROWS, PRECISION)
            s_MN += 0.5 * x_MN * x_MN
        elif ROWS > 1:  # not unrolled: the tiles of all rows together exceed shared memory
            for row in tl.range(1, ROWS):
                at = table_ptr + row * N_FULL * G * K
                x_MN = row_scores(q_MK, at, chunk_N, G, K, KP, N_FULL, PARTS, ROWS, PRECISION)
                s_MN = tl.maximum(s_MN, x_MN)
        s_MN = tl.where(chunk_N[None, :] < n_M[:, None], s_MN, float("-inf"))
        for rank in tl.static_range(TOP_K):
            top_M, at_M = tl.max(s_MN, 1, return_indices=True, return_indices_tie_break_left=True)
            bests, sels = inserted(bests, sels, top_M, start + at_M, TOP_K)
            if rank + 1 < TOP_K:
                s_MN = tl.where(chunk_N[None, :] == start + at_M[:, None], float("-inf"), s_MN)
    return sels


@triton.jit
def table_kernel(
    q_ptr, table_ptr, sel_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    N_FULL: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, SQUARED: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write sel [B, T, H, TOP_K] int32 by table score.

    The PARTS of table [B, PARTS, ROWS, T // C, G, K] add up to fp32 rows. With x = q . row, a chunk's score is the
    largest x, or x_0 + x_1^2 / 2 when SQUARED.
    """
    n_tiles: tl.constexpr = (T + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    tile = n_tiles - 1 - pid % n_tiles
    b, h = (pid // n_tiles // H).to(tl.int64), pid // n_tiles % H
    table_ptr += b * PARTS * ROWS * N_FULL * G * K + h // (H // G) * K
    row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n_M = row_M // C
    q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
    last = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, T - 1) // C
    sels = best_by_table(
        q_MK, table_ptr, n_M, last, G, K, KP, N_FULL, PARTS, ROWS, SQUARED, TOP_K, BLOCK_N, PRECISION
    )  # fmt: skip
    _store_lists(sel_ptr, sels, n_M, b, h, row_M, T, H, TOP_K)


@triton.jit
def listed_kernel(
    q_ptr, k_ptr, order_ptr, first_ptr, ends_ptr, top_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    LISTED: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write top [B, H, N] fp32 for rows with a chunk: the largest score of its keys.

    Row t LISTED + j of the N = T LISTED rows is the j-th candidate of query t. A program has a segment of rows with the
    same chunk, and reads its keys once if they fit one tile.
    """
    N: tl.constexpr = T * LISTED
    IS_ONE: tl.constexpr = C <= BLOCK_N
    pid = tl.program_id(0)
    bh = pid // SEGMENTS
    b, h = (bh // H).to(tl.int64), bh % H
    chunk, nth = block_of(ends_ptr + bh * NC, pid % SEGMENTS, NC, NCP)
    if chunk < NC:
        begin = tl.load(first_ptr + bh * (NC + 1) + chunk) + nth * SEGMENT
        end = tl.minimum(begin + SEGMENT, tl.load(first_ptr + bh * (NC + 1) + chunk + 1))
        k_ptr += b * T * G * K + h // (H // G) * K
        n = tl.arange(0, BLOCK_N)
        if IS_ONE:
            k_NK = load_rows(k_ptr, chunk * C + n, G * K, chunk * C + C, K, KP, C != BLOCK_N)
        for start in tl.range(begin, end, BLOCK_M):
            place_M = start + tl.arange(0, BLOCK_M)
            row_M = tl.load(order_ptr + bh.to(tl.int64) * N + place_M, mask=place_M < end, other=N)
            q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M // LISTED, H * K, T, K, KP, True)
            if IS_ONE:
                s_MN = tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION)
                if C != BLOCK_N:
                    s_MN = tl.where((n < C)[None, :], s_MN, float("-inf"))
                top_M = tl.max(s_MN, 1)
            else:
                top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
                for piece in tl.range(0, C, BLOCK_N):
                    at, stop = chunk * C + piece, chunk * C + C
                    s_MN = scores(q_MK, k_ptr, at, stop, T, G, K, KP, BLOCK_N, C % BLOCK_N != 0, PRECISION)
                    top_M = tl.maximum(top_M, tl.max(s_MN, 1))
            tl.store(top_ptr + bh.to(tl.int64) * N + row_M, top_M, mask=row_M < N)
