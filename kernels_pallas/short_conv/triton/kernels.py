"""Triton kernels of the short convolution: one pass per direction.

    operand        shape              dtype    meaning
    x, y, dy, dx   [B, T, E]          input    inputs, results and their gradients
    w, b           [B, E, W], [B, E]  fp32     taps and bias (HAS_BIAS), one copy per batch entry
    last, dlast    [B, W - 1, E]      input    inputs before the first position (HAS_LAST)
    reach          [B, T]             int32    how many previous inputs a position reads (HAS_REACH)
    parts          [B, tiles, N, E]   fp32     tap and bias gradients, summed within each time tile; N = W + HAS_BIAS

    z_t = sum_i w_i x_{t - W + 1 + i} + b,   s = silu(z) or z,   y = s or scale s / sqrt(sum of s^2 + eps) per head

One program handles K channels (one head if it is normalised), padded to KP, and R time pieces with STEPS positions
each. It advances all pieces together, one position per step, and keeps the last W - 1 input (and gradient) rows in
registers. Each row is therefore loaded once, and its sigmoid and head sums are computed once; only W - 1 rows are
repeated per piece boundary. Shifted loads would compute dz, with its sigmoid and sums, W times. The loads of U
positions are issued together, and no position is indexed at run time. Padding and positions outside [0, T) load as
zero. Equations and sources: `short_conv/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import LOG2_E


@triton.jit
def place_of(T: tl.constexpr, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr):
    """Return a program's place in the operands.

    Batch entry, index into [B, time tiles], first positions of the pieces, channels, and a mask of existing channels.
    """
    n_blocks: tl.constexpr = (E + K - 1) // K
    n_tiles: tl.constexpr = (T + R * STEPS - 1) // (R * STEPS)
    pid = tl.program_id(0)
    tile = (pid // n_blocks).to(tl.int64)
    first_R = (pid // n_blocks % n_tiles * R + tl.arange(0, R)) * STEPS
    d_K = tl.arange(0, KP)
    e_K = pid % n_blocks * K + d_K
    return tile // n_tiles, tile, first_R, e_K, (d_K < K) & (e_K < E)


@triton.jit
def load_row(ptr, t_R, n, E: tl.constexpr, e_K, is_K):
    """Return [R, K] of [n, E] at the positions `t_R`; zero outside [0, n)."""
    mask = ((t_R >= 0) & (t_R < n))[:, None] & is_K[None, :]
    return tl.load(ptr + t_R[:, None] * E + e_K[None, :], mask=mask, other=0.0)


@triton.jit
def store_row(ptr, t_R, is_R, E: tl.constexpr, e_K, is_K, x_RK):
    """Write [R, K] to [n, E] at the positions `t_R` where `is_R`."""
    mask = is_R[:, None] & is_K[None, :]
    tl.store(ptr + t_R[:, None] * E + e_K[None, :], x_RK.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(ptr, t_R, n, E: tl.constexpr, e_K, is_K, U: tl.constexpr):
    """Return the rows for U positions from `t_R` on, as a tuple."""
    rows = ()
    for i in tl.static_range(U):
        rows += (load_row(ptr, t_R + i, n, E, e_K, is_K),)
    return rows


@triton.jit
def load_past(x_ptr, last_ptr, t_R, T, E: tl.constexpr, e_K, is_K, W: tl.constexpr, HAS_LAST: tl.constexpr):
    """Return the W - 1 rows before `t_R` in float32.

    Rows before the first position come from `last`.
    """
    rows = ()
    for i in tl.static_range(W - 1):
        row = load_row(x_ptr, t_R - (W - 1) + i, T, E, e_K, is_K)
        if HAS_LAST:
            row += load_row(last_ptr, t_R + i, W - 1, E, e_K, is_K)
        rows += (row.to(tl.float32),)
    return rows


@triton.jit
def widened(rows, U: tl.constexpr):
    """Return the rows in float32.

    Separate from the loads, because a conversion waits for its load.
    """
    wide = ()
    for i in tl.static_range(U):
        wide += (rows[i].to(tl.float32),)
    return wide


@triton.jit
def part(rows, at: tl.constexpr, n: tl.constexpr):
    """Return `n` of the rows, from `at` on."""
    tiles = ()
    for i in tl.static_range(n):
        tiles += (rows[at + i],)
    return tiles


@triton.jit
def load_taps(w_ptr, b_ptr, e_K, is_K, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the W taps and, with HAS_BIAS, the bias: [1, K] each."""
    taps = ()
    for i in tl.static_range(W):
        taps += (tl.load(w_ptr + e_K * W + i, mask=is_K, other=0.0)[None, :],)
    if HAS_BIAS:
        taps += (tl.load(b_ptr + e_K, mask=is_K, other=0.0)[None, :],)
    return taps


@triton.jit
def load_reach(ptr, t_R, T, n: tl.constexpr, HAS_REACH: tl.constexpr):
    """Return how many previous inputs n positions from `t_R` on read, [R] each.

    It is 0 outside [0, T). Without HAS_REACH, the tuple is empty.
    """
    reach = ()
    if HAS_REACH:
        for i in tl.static_range(n):
            reach += (tl.load(ptr + t_R + i, mask=(t_R + i >= 0) & (t_R + i < T), other=0),)
    return reach


@triton.jit
def within(x_RK, reach, at: tl.constexpr, back: tl.constexpr, HAS_REACH: tl.constexpr):
    """Return x where the position `at` reads the input `back` positions before it, else 0."""
    if HAS_REACH:
        return tl.where((reach[at] >= back)[:, None], x_RK, 0.0)
    else:
        return x_RK


@triton.jit
def convolved(
    rows, at: tl.constexpr, taps, reach, when: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_REACH: tl.constexpr,
):  # fmt: skip
    """Return z at the position with input row `at` + W - 1 and reach `when`."""
    z_RK = within(rows[at], reach, when, W - 1, HAS_REACH) * taps[0]
    if HAS_BIAS:
        z_RK += taps[W]
    for i in tl.static_range(1, W):
        z_RK += within(rows[at + i], reach, when, W - 1 - i, HAS_REACH) * taps[i]
    return z_RK


@triton.jit
def sigmoid(z):
    """Return 1 / (1 + e^-z) as the square of a reciprocal root.

    It takes five instructions; `tl.sigmoid` takes 13.
    """
    root = tl.rsqrt(1.0 + tl.exp2(z * -LOG2_E))
    return root * root


@triton.jit
def conv_kernel(
    x_ptr, w_ptr, b_ptr, last_ptr, reach_ptr, y_ptr,
    T: tl.constexpr, E: tl.constexpr, W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    STEPS: tl.constexpr, U: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LAST: tl.constexpr, HAS_REACH: tl.constexpr,
):  # fmt: skip
    """Compute y for one program's channels and time tile."""
    b, _, first_R, e_K, is_K = place_of(T, E, K, KP, R, STEPS)
    x_ptr += b * (T * E)
    y_ptr += b * (T * E)
    reach_ptr += b * T
    taps = load_taps(w_ptr + b * (E * W), b_ptr + b * E, e_K, is_K, W, HAS_BIAS)
    past = load_past(x_ptr, last_ptr + b * ((W - 1) * E), first_R, T, E, e_K, is_K, W, HAS_LAST)
    for block in tl.range(0, STEPS // U):
        t_R = first_R + block * U
        xs = past + widened(load_rows(x_ptr, t_R, T, E, e_K, is_K, U), U)
        reach = load_reach(reach_ptr, t_R, T, U, HAS_REACH)
        for i in tl.static_range(U):
            y_RK = convolved(xs, i, taps, reach, i, W, HAS_BIAS, HAS_REACH)
            if SILU:
                y_RK *= sigmoid(y_RK)
            if NORM:
                y_RK *= SCALE * tl.rsqrt(tl.sum(y_RK * y_RK, 1) + EPS)[:, None]
            store_row(y_ptr, t_R + i, t_R + i < T, E, e_K, is_K, y_RK)
        past = part(xs, U, W - 1)


@triton.jit
def gradient_of_z(z_RK, g_RK, SILU: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr):
    """Return dz for the gradient g of y."""
    s_RK = z_RK
    if SILU:
        p_RK = sigmoid(z_RK)
        s_RK = z_RK * p_RK
    if NORM:
        r_R = tl.rsqrt(tl.sum(s_RK * s_RK, 1) + EPS)
        along_R = tl.sum(g_RK * s_RK, 1) * (r_R * r_R)
        g_RK = (g_RK - s_RK * along_R[:, None]) * (SCALE * r_R)[:, None]
    if SILU:
        g_RK *= p_RK + s_RK * (1.0 - p_RK)
    return g_RK


@triton.jit
def gradient_of_x(dzs, at: tl.constexpr, taps, reach, W: tl.constexpr, HAS_REACH: tl.constexpr):
    """Return dx for the position with dz row and reach `at`."""
    dx_RK = dzs[at] * taps[W - 1]
    for i in tl.static_range(1, W):
        dx_RK += within(dzs[at + i], reach, at + i, i, HAS_REACH) * taps[W - 1 - i]
    return dx_RK


@triton.jit
def conv_bwd_kernel(
    x_ptr, w_ptr, b_ptr, last_ptr, reach_ptr, dy_ptr, dx_ptr, parts_ptr, dlast_ptr,
    T: tl.constexpr, E: tl.constexpr, W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    STEPS: tl.constexpr, U: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LAST: tl.constexpr, HAS_REACH: tl.constexpr,
):  # fmt: skip
    """Compute dx, dlast and partial dw and db for a program's channels and tile.

    With a bias, the last row of `parts` is db. The dx at a position needs the next W - 1 dz, so the kernel writes
    the row W - 1 positions before the current one. The first W - 1 such rows of a piece belong to the previous piece,
    or to dlast; W - 1 extra steps after the end of a piece complete its last rows.
    """
    b, tile, first_R, e_K, is_K = place_of(T, E, K, KP, R, STEPS)
    x_ptr += b * (T * E)
    dy_ptr += b * (T * E)
    dx_ptr += b * (T * E)
    reach_ptr += b * T
    dlast_ptr += b * ((W - 1) * E)
    taps = load_taps(w_ptr + b * (E * W), b_ptr + b * E, e_K, is_K, W, HAS_BIAS)
    past = load_past(x_ptr, last_ptr + b * ((W - 1) * E), first_R, T, E, e_K, is_K, W, HAS_LAST)
    zero_RK = tl.zeros([R, KP], tl.float32)
    N: tl.constexpr = W + HAS_BIAS
    past_dz = ()
    sums = ()
    for _ in tl.static_range(W - 1):
        past_dz += (zero_RK,)
    for _ in tl.static_range(N):
        sums += (zero_RK,)
    for block in tl.range(0, STEPS // U):
        t_R = first_R + block * U
        new_xs = load_rows(x_ptr, t_R, T, E, e_K, is_K, U)
        new_gs = load_rows(dy_ptr, t_R, T, E, e_K, is_K, U)
        xs, gs = past + widened(new_xs, U), widened(new_gs, U)
        dzs = past_dz
        reach = load_reach(reach_ptr, t_R - (W - 1), T, U + W - 1, HAS_REACH)
        for i in tl.static_range(U):
            z_RK = convolved(xs, i, taps, reach, i + W - 1, W, HAS_BIAS, HAS_REACH)
            dz_RK = gradient_of_z(z_RK, gs[i], SILU, NORM, SCALE, EPS)
            dzs += (dz_RK,)
            new_sums = ()
            for j in tl.static_range(W):
                new_sums += (sums[j] + dz_RK * within(xs[i + j], reach, i + W - 1, W - 1 - j, HAS_REACH),)
            if HAS_BIAS:
                new_sums += (sums[W] + dz_RK,)
            sums = new_sums
            s_R = t_R + i - (W - 1)
            dx_RK = gradient_of_x(dzs, i, taps, reach, W, HAS_REACH)
            store_row(dx_ptr, s_R, (s_R >= first_R) & (s_R < T), E, e_K, is_K, dx_RK)
            if HAS_LAST:
                store_row(dlast_ptr, s_R + (W - 1), s_R < 0, E, e_K, is_K, dx_RK)
        past = part(xs, U, W - 1)
        past_dz = part(dzs, U, W - 1)

    t_R = first_R + STEPS
    xs = past + widened(load_rows(x_ptr, t_R, T, E, e_K, is_K, W - 1), W - 1)
    gs = widened(load_rows(dy_ptr, t_R, T, E, e_K, is_K, W - 1), W - 1)
    dzs = past_dz
    reach = load_reach(reach_ptr, t_R - (W - 1), T, 2 * (W - 1), HAS_REACH)
    for i in tl.static_range(W - 1):
        z_RK = convolved(xs, i, taps, reach, i + W - 1, W, HAS_BIAS, HAS_REACH)
        dzs += (gradient_of_z(z_RK, gs[i], SILU, NORM, SCALE, EPS),)
        s_R = t_R + i - (W - 1)
        dx_RK = gradient_of_x(dzs, i, taps, reach, W, HAS_REACH)
        store_row(dx_ptr, s_R, (s_R >= first_R) & (s_R < T), E, e_K, is_K, dx_RK)
    parts_ptr += tile * (N * E)
    for j in tl.static_range(N):
        tl.store(parts_ptr + j * E + e_K, tl.sum(sums[j], 0), mask=is_K)
