"""Triton kernels of the token shift: one pass per direction.

    operand          shape              dtype    meaning
    x, dx            [B, T, D]          input    inputs
    mu               [N, B, D]          fp32     previous input's weights, one copy per batch entry
    moves, dmoves    [N, B, T, D]       input    per-token offsets of mu (HAS_MOVES)
    last, dlast      [B, D]             input    input before the first position (HAS_LAST)
    reach            [B, T]             int32    0 where a position reads zero as its previous input (HAS_REACH)
    y0 ... y5        [B, T, D]          input    results for N <= 6 branches; unused pointers are placeholders
    g0 ... g5        [B, T, D]          input    result gradients
    parts            [B, tiles, N, D]   fp32     mu gradients, summed within each time tile

    y_n,t = x_t + (x_{t-1} - x_t) m_n,t,   m_n,t = mu_n + moves_n,t

One program handles K channels (padded to KP) and R time pieces with STEPS positions each. It advances all pieces
together, one position per step. The previous row stays in registers, and each row is loaded once for all branches; XLA
uses several fusions and adds dx branch by branch. The loads of U positions are issued together. The row functions are
shared with short_conv/triton/kernels.py. Equations and sources: `token_shift/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.short_conv.triton.kernels import (
    load_past,
    load_reach,
    load_row,
    load_rows,
    part,
    place_of,
    store_row,
    widened,
    within,
)


@triton.jit
def shares(mu_ptr, step: tl.constexpr, e_K, is_K, N: tl.constexpr):
    """Return each branch's mu, [1, K]."""
    mus = ()
    for n in tl.static_range(N):
        mus += (tl.load(mu_ptr + n * step + e_K, mask=is_K, other=0.0)[None, :],)
    return mus


@triton.jit
def load_moves(ptr, step: tl.constexpr, t_R, T, D: tl.constexpr, e_K, is_K, N: tl.constexpr, U: tl.constexpr):
    """Return rows for U positions and N branches, whose arrays are `step` apart."""
    rows = ()
    for i in tl.static_range(U):
        for n in tl.static_range(N):
            rows += (load_row(ptr + n * step, t_R + i, T, D, e_K, is_K),)
    return rows


@triton.jit
def load_gradients(ptrs, t_R, T, D: tl.constexpr, e_K, is_K, N: tl.constexpr, U: tl.constexpr):
    """Return rows for U positions and N branches, from one pointer per branch."""
    rows = ()
    for i in tl.static_range(U):
        for n in tl.static_range(N):
            rows += (load_row(ptrs[n], t_R + i, T, D, e_K, is_K),)
    return rows


@triton.jit
def shift_kernel(
    x_ptr, mu_ptr, moves_ptr, last_ptr, reach_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, y4_ptr, y5_ptr,
    B: tl.constexpr, T: tl.constexpr, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    R: tl.constexpr, STEPS: tl.constexpr, U: tl.constexpr, HAS_MOVES: tl.constexpr, HAS_LAST: tl.constexpr,
    HAS_REACH: tl.constexpr,
):  # fmt: skip
    """Compute N results y [B, T, D] for one program's channels and time tile."""
    b, _, first_R, e_K, is_K = place_of(T, D, K, KP, R, STEPS)
    step: tl.constexpr = B * T * D  # entries per branch
    at = b * (T * D)
    x_ptr += at
    moves_ptr += at
    reach_ptr += b * T
    y_ptrs = (y0_ptr + at, y1_ptr + at, y2_ptr + at, y3_ptr + at, y4_ptr + at, y5_ptr + at)
    mus = shares(mu_ptr + b * D, B * D, e_K, is_K, N)
    past = load_past(x_ptr, last_ptr + b * D, first_R, T, D, e_K, is_K, 2, HAS_LAST)
    for block in tl.range(0, STEPS // U):
        t_R = first_R + block * U
        new_xs = load_rows(x_ptr, t_R, T, D, e_K, is_K, U)
        if HAS_MOVES:
            moves = load_moves(moves_ptr, step, t_R, T, D, e_K, is_K, N, U)
        reach = load_reach(reach_ptr, t_R, T, U, HAS_REACH)
        xs = past + widened(new_xs, U)
        for i in tl.static_range(U):
            delta_RK = within(xs[i], reach, i, 1, HAS_REACH) - xs[i + 1]
            for n in tl.static_range(N):
                m_RK = mus[n]
                if HAS_MOVES:
                    m_RK += moves[i * N + n].to(tl.float32)
                store_row(y_ptrs[n], t_R + i, t_R + i < T, D, e_K, is_K, xs[i + 1] + delta_RK * m_RK)
        past = part(xs, U, 1)


@triton.jit
def shift_bwd_kernel(
    x_ptr, mu_ptr, moves_ptr, last_ptr, reach_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr, g4_ptr, g5_ptr,
    dx_ptr, parts_ptr, dmoves_ptr, dlast_ptr,
    B: tl.constexpr, T: tl.constexpr, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    R: tl.constexpr, STEPS: tl.constexpr, U: tl.constexpr, HAS_MOVES: tl.constexpr, HAS_LAST: tl.constexpr,
    HAS_REACH: tl.constexpr,
):  # fmt: skip
    """Compute dx, dmoves, dlast and parts of dmu for a program's channels and tile.

    Each position adds `own` to dx at its position and `back` to dx at the previous one. The kernel therefore writes
    dx one position late. The first such row of a piece belongs to the previous piece, or to dlast; one extra step after
    the end of a piece completes its last row.
    """
    b, tile, first_R, e_K, is_K = place_of(T, D, K, KP, R, STEPS)
    step: tl.constexpr = B * T * D  # entries per branch
    at = b * (T * D)
    x_ptr += at
    moves_ptr += at
    reach_ptr += b * T
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
        reach = load_reach(reach_ptr, t_R, T, U, HAS_REACH)
        xs = past + widened(new_xs, U)
        for i in tl.static_range(U):
            delta_RK = within(xs[i], reach, i, 1, HAS_REACH) - xs[i + 1]
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
            before_RK = within(back_RK, reach, i, 1, HAS_REACH)
            store_row(dx_ptr, s_R, (s_R >= first_R) & (s_R < T), D, e_K, is_K, own_RK + before_RK)
            if HAS_LAST:
                store_row(dlast_ptr + b * D, s_R + 1, s_R < 0, D, e_K, is_K, before_RK)
            own_RK = all_RK - back_RK
        past = part(xs, U, 1)

    t_R = first_R + STEPS
    gs = load_gradients(g_ptrs, t_R, T, D, e_K, is_K, N, 1)
    if HAS_MOVES:
        moves = load_moves(moves_ptr, step, t_R, T, D, e_K, is_K, N, 1)
    reach = load_reach(reach_ptr, t_R, T, 1, HAS_REACH)
    for n in tl.static_range(N):
        m_RK = mus[n]
        if HAS_MOVES:
            m_RK += moves[n].to(tl.float32)
        own_RK += within(gs[n].to(tl.float32) * m_RK, reach, 0, 1, HAS_REACH)
    store_row(dx_ptr, t_R - 1, t_R - 1 < T, D, e_K, is_K, own_RK)
    for n in tl.static_range(N):
        tl.store(parts_ptr + (tile * N + n) * D + e_K, tl.sum(sums[n], 0), mask=is_K)
