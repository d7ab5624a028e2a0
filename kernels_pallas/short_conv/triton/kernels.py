"""Triton kernels of the short convolution: rows of R pieces of time x KP channels in registers, one position a step.

A program goes through its R pieces of STEPS positions side by side and keeps the last W - 1 rows of inputs (and of
gradients), so a row is loaded, and its sigmoid and sums over a head are made, once; only the W - 1 rows beside a piece
are its neighbour's too. The loads of U positions are issued together, and no position is indexed at run time.

Blocks are of K channels, padded to KP: a head where it is normalised. Padding and positions outside [0, T) load as
zero.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import LOG2_E


@triton.jit
def place_of(T: tl.constexpr, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr):
    """Batch entry, index into [B, tiles of time], first positions of the pieces, channels and which of them exist."""
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
    """[R, K] of [n, E] at the positions `t_R`."""
    mask = ((t_R >= 0) & (t_R < n))[:, None] & is_K[None, :]
    return tl.load(ptr + t_R[:, None] * E + e_K[None, :], mask=mask, other=0.0)


@triton.jit
def store_row(ptr, t_R, is_R, E: tl.constexpr, e_K, is_K, x_RK):
    """Write [R, K] to the positions of [n, E] in `is_R`."""
    mask = is_R[:, None] & is_K[None, :]
    tl.store(ptr + t_R[:, None] * E + e_K[None, :], x_RK.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(ptr, t_R, n, E: tl.constexpr, e_K, is_K, U: tl.constexpr):
    """The rows of U positions from `t_R` on, as a tuple."""
    rows = ()
    for i in tl.static_range(U):
        rows += (load_row(ptr, t_R + i, n, E, e_K, is_K),)
    return rows


@triton.jit
def load_past(x_ptr, last_ptr, t_R, T, E: tl.constexpr, e_K, is_K, W: tl.constexpr, HAS_LAST: tl.constexpr):
    """The W - 1 rows before `t_R` as float32; those before the first position come from `last`, which has W - 1."""
    rows = ()
    for i in tl.static_range(W - 1):
        row = load_row(x_ptr, t_R - (W - 1) + i, T, E, e_K, is_K)
        if HAS_LAST:
            row += load_row(last_ptr, t_R + i, W - 1, E, e_K, is_K)
        rows += (row.to(tl.float32),)
    return rows


@triton.jit
def widened(rows, U: tl.constexpr):
    """The rows as float32: apart from the loads, because it waits for them."""
    wide = ()
    for i in tl.static_range(U):
        wide += (rows[i].to(tl.float32),)
    return wide


@triton.jit
def part(rows, at: tl.constexpr, n: tl.constexpr):
    """`n` of the rows, from `at` on."""
    found = ()
    for i in tl.static_range(n):
        found += (rows[at + i],)
    return found


@triton.jit
def load_taps(w_ptr, b_ptr, e_K, is_K, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The W taps and, if there is one, the bias, [1, K] each."""
    taps = ()
    for i in tl.static_range(W):
        taps += (tl.load(w_ptr + e_K * W + i, mask=is_K, other=0.0)[None, :],)
    if HAS_BIAS:
        taps += (tl.load(b_ptr + e_K, mask=is_K, other=0.0)[None, :],)
    return taps


@triton.jit
def convolved(rows, at: tl.constexpr, taps, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The z of the position whose input is row `at` + W - 1."""
    z_RK = rows[at] * taps[0]
    if HAS_BIAS:
        z_RK += taps[W]
    for i in tl.static_range(1, W):
        z_RK += rows[at + i] * taps[i]
    return z_RK


@triton.jit
def sigmoid(z):
    """1 / (1 + e^-z) as the square of a reciprocal root, which takes five instructions where `tl.sigmoid` takes 13."""
    root = tl.rsqrt(1.0 + tl.exp2(z * -LOG2_E))
    return root * root


@triton.jit
def conv_kernel(
    x_ptr, w_ptr, b_ptr, last_ptr, y_ptr,
    T: tl.constexpr, E: tl.constexpr, W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    STEPS: tl.constexpr, U: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """The y [B, T, E] of x [B, T, E], w [B, E, W] and b [B, E] fp32, last [B, W - 1, E]."""
    b, _, first_R, e_K, is_K = place_of(T, E, K, KP, R, STEPS)
    x_ptr += b * (T * E)
    y_ptr += b * (T * E)
    taps = load_taps(w_ptr + b * (E * W), b_ptr + b * E, e_K, is_K, W, HAS_BIAS)
    past = load_past(x_ptr, last_ptr + b * ((W - 1) * E), first_R, T, E, e_K, is_K, W, HAS_LAST)
    for block in tl.range(0, STEPS // U):
        t_R = first_R + block * U
        xs = past + widened(load_rows(x_ptr, t_R, T, E, e_K, is_K, U), U)
        for i in tl.static_range(U):
            y_RK = convolved(xs, i, taps, W, HAS_BIAS)
            if SILU:
                y_RK *= sigmoid(y_RK)
            if NORM:
                y_RK *= SCALE * tl.rsqrt(tl.sum(y_RK * y_RK, 1) + EPS)[:, None]
            store_row(y_ptr, t_R + i, t_R + i < T, E, e_K, is_K, y_RK)
        past = part(xs, U, W - 1)


@triton.jit
def gradient_of_z(z_RK, g_RK, SILU: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr):
    """The dz of a gradient g of y."""
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
def gradient_of_x(dzs, at: tl.constexpr, taps, W: tl.constexpr):
    """The dx of the position whose dz is row `at`."""
    dx_RK = dzs[at] * taps[W - 1]
    for i in tl.static_range(1, W):
        dx_RK += dzs[at + i] * taps[W - 1 - i]
    return dx_RK


@triton.jit
def conv_bwd_kernel(
    x_ptr, w_ptr, b_ptr, last_ptr, dy_ptr, dx_ptr, parts_ptr, dlast_ptr,
    T: tl.constexpr, E: tl.constexpr, W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    STEPS: tl.constexpr, U: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """Gradients dx [B, T, E] and dlast [B, W - 1, E]; parts [B, tiles, N, E] of dw and, with a bias, as last row of db.

    The row W - 1 before the current one has all of its dz: these are the rows that are written. So the first W - 1 of a
    piece belong to the piece before, or to dlast, and W - 1 more follow its end.
    """
    b, tile, first_R, e_K, is_K = place_of(T, E, K, KP, R, STEPS)
    x_ptr += b * (T * E)
    dy_ptr += b * (T * E)
    dx_ptr += b * (T * E)
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
        for i in tl.static_range(U):
            dz_RK = gradient_of_z(convolved(xs, i, taps, W, HAS_BIAS), gs[i], SILU, NORM, SCALE, EPS)
            dzs += (dz_RK,)
            new_sums = ()
            for j in tl.static_range(W):
                new_sums += (sums[j] + dz_RK * xs[i + j],)
            if HAS_BIAS:
                new_sums += (sums[W] + dz_RK,)
            sums = new_sums
            s_R = t_R + i - (W - 1)
            dx_RK = gradient_of_x(dzs, i, taps, W)
            store_row(dx_ptr, s_R, (s_R >= first_R) & (s_R < T), E, e_K, is_K, dx_RK)
            if HAS_LAST:
                store_row(dlast_ptr, s_R + (W - 1), s_R < 0, E, e_K, is_K, dx_RK)
        past = part(xs, U, W - 1)
        past_dz = part(dzs, U, W - 1)

    t_R = first_R + STEPS
    xs = past + widened(load_rows(x_ptr, t_R, T, E, e_K, is_K, W - 1), W - 1)
    gs = widened(load_rows(dy_ptr, t_R, T, E, e_K, is_K, W - 1), W - 1)
    dzs = past_dz
    for i in tl.static_range(W - 1):
        dzs += (gradient_of_z(convolved(xs, i, taps, W, HAS_BIAS), gs[i], SILU, NORM, SCALE, EPS),)
        s_R = t_R + i - (W - 1)
        store_row(dx_ptr, s_R, (s_R >= first_R) & (s_R < T), E, e_K, is_K, gradient_of_x(dzs, i, taps, W))
    parts_ptr += tile * (N * E)
    for j in tl.static_range(N):
        tl.store(parts_ptr + j * E + e_K, tl.sum(sums[j], 0), mask=is_K)
