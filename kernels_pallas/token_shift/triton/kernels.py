"""Triton kernels of the token shift: one pass over the inputs forward, one over inputs and gradients backward.

A program goes through pieces of time side by side, one position a step, as those of the short convolution do, whose
functions it shares: the row before is in registers. What a variant has fewer of than six is some other array.
"""

import triton
import triton.language as tl

from kernels_pallas.short_conv.triton.kernels import load_past, load_row, load_rows, part, place_of, store_row, widened


@triton.jit
def shares(mu_ptr, step: tl.constexpr, e_K, is_K, N: tl.constexpr):
    """The mu of every branch, [1, K] each."""
    mus = ()
    for n in tl.static_range(N):
        mus += (tl.load(mu_ptr + n * step + e_K, mask=is_K, other=0.0)[None, :],)
    return mus


@triton.jit
def load_moves(ptr, step: tl.constexpr, t_R, T, D: tl.constexpr, e_K, is_K, N: tl.constexpr, U: tl.constexpr):
    """The rows of U positions, N each, of arrays that are `step` entries apart."""
    rows = ()
    for i in tl.static_range(U):
        for n in tl.static_range(N):
            rows += (load_row(ptr + n * step, t_R + i, T, D, e_K, is_K),)
    return rows


@triton.jit
def load_gradients(ptrs, t_R, T, D: tl.constexpr, e_K, is_K, N: tl.constexpr, U: tl.constexpr):
    """The rows of U positions, N each."""
    rows = ()
    for i in tl.static_range(U):
        for n in tl.static_range(N):
            rows += (load_row(ptrs[n], t_R + i, T, D, e_K, is_K),)
    return rows


@triton.jit
def shift_kernel(
    x_ptr, mu_ptr, moves_ptr, last_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, y4_ptr, y5_ptr,
    B: tl.constexpr, T: tl.constexpr, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    R: tl.constexpr, STEPS: tl.constexpr, U: tl.constexpr, HAS_MOVES: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """N results y [B, T, D] of x [B, T, D], mu [N, B, D] fp32, moves [N, B, T, D] and last [B, D]."""
    b, _, first_R, e_K, is_K = place_of(T, D, K, KP, R, STEPS)
    step: tl.constexpr = B * T * D  # of a branch
    at = b * (T * D)
    x_ptr += at
    moves_ptr += at
    y_ptrs = (y0_ptr + at, y1_ptr + at, y2_ptr + at, y3_ptr + at, y4_ptr + at, y5_ptr + at)
    mus = shares(mu_ptr + b * D, B * D, e_K, is_K, N)
    past = load_past(x_ptr, last_ptr + b * D, first_R, T, D, e_K, is_K, 2, HAS_LAST)
    for block in tl.range(0, STEPS // U):
        t_R = first_R + block * U
        new_xs = load_rows(x_ptr, t_R, T, D, e_K, is_K, U)
        if HAS_MOVES:
            moves = load_moves(moves_ptr, step, t_R, T, D, e_K, is_K, N, U)
        xs = past + widened(new_xs, U)
        for i in tl.static_range(U):
            delta_RK = xs[i] - xs[i + 1]
            for n in tl.static_range(N):
                m_RK = mus[n]
                if HAS_MOVES:
                    m_RK += moves[i * N + n].to(tl.float32)
                store_row(y_ptrs[n], t_R + i, t_R + i < T, D, e_K, is_K, xs[i + 1] + delta_RK * m_RK)
        past = part(xs, U, 1)


@triton.jit
def shift_bwd_kernel(
    x_ptr, mu_ptr, moves_ptr, last_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr, g4_ptr, g5_ptr,
    dx_ptr, parts_ptr, dmoves_ptr, dlast_ptr,
    B: tl.constexpr, T: tl.constexpr, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    R: tl.constexpr, STEPS: tl.constexpr, U: tl.constexpr, HAS_MOVES: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """Gradients dx [B, T, D], dmoves [N, B, T, D] and dlast [B, D]; parts [B, tiles, N, D] fp32 of dmu.

    A position gives its own input `own` and the one before `back`. So the row before the current one is written; the
    first of a piece belongs to the piece before, or to dlast, and one more follows its end.
    """
    b, tile, first_R, e_K, is_K = place_of(T, D, K, KP, R, STEPS)
    step: tl.constexpr = B * T * D  # of a branch
    at = b * (T * D)
    x_ptr += at
    moves_ptr += at
    dx_ptr += at
    dmoves_ptr += at
    g_ptrs = (g0_ptr + at, g1_ptr + at, g2_ptr + at, g3_ptr + at, g4_ptr + at, g5_ptr + at)
    mus = shares(mu_ptr + b * D, B * D, e_K, is_K, N)
    past = load_past(x_ptr, last_ptr + b * D, first_R, T, D, e_K, is_K, 2, HAS_LAST)
    zero_RK = tl.zeros([R, KP], tl.float32)
    own_RK = zero_RK
    sums = ()
    for _ in tl.static_range(N):
        sums += (zero_RK,)
    for block in tl.range(0, STEPS // U):
        t_R = first_R + block * U
        new_xs = load_rows(x_ptr, t_R, T, D, e_K, is_K, U)
        gs = load_gradients(g_ptrs, t_R, T, D, e_K, is_K, N, U)
        if HAS_MOVES:
            moves = load_moves(moves_ptr, step, t_R, T, D, e_K, is_K, N, U)
        xs = past + widened(new_xs, U)
        for i in tl.static_range(U):
            delta_RK = xs[i] - xs[i + 1]
            all_RK, back_RK, new_sums = zero_RK, zero_RK, ()
            for n in tl.static_range(N):
                g_RK, m_RK = gs[i * N + n].to(tl.float32), mus[n]
                if HAS_MOVES:
                    m_RK += moves[i * N + n].to(tl.float32)
                    store_row(dmoves_ptr + n * step, t_R + i, t_R + i < T, D, e_K, is_K, g_RK * delta_RK)
                all_RK += g_RK
                back_RK += g_RK * m_RK
                new_sums += (sums[n] + g_RK * delta_RK,)
            sums = new_sums
            s_R = t_R + i - 1
            store_row(dx_ptr, s_R, (s_R >= first_R) & (s_R < T), D, e_K, is_K, own_RK + back_RK)
            if HAS_LAST:
                store_row(dlast_ptr + b * D, s_R + 1, s_R < 0, D, e_K, is_K, back_RK)
            own_RK = all_RK - back_RK
        past = part(xs, U, 1)

    t_R = first_R + STEPS
    gs = load_gradients(g_ptrs, t_R, T, D, e_K, is_K, N, 1)
    if HAS_MOVES:
        moves = load_moves(moves_ptr, step, t_R, T, D, e_K, is_K, N, 1)
    for n in tl.static_range(N):
        m_RK = mus[n]
        if HAS_MOVES:
            m_RK += moves[n].to(tl.float32)
        own_RK += gs[n].to(tl.float32) * m_RK
    store_row(dx_ptr, t_R - 1, t_R - 1 < T, D, e_K, is_K, own_RK)
    for n in tl.static_range(N):
        tl.store(parts_ptr + (tile * N + n) * D + e_K, tl.sum(sums[n], 0), mask=is_K)
