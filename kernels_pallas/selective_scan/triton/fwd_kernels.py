"""Triton kernels of the selective scan: states [BLOCK_E, NP] in registers, one program (of one warp) per channel block.

A program goes over its positions U at a time: the loads of U positions are issued together (in `scan_kernel`, whose
programs may be few, those of the next U before the steps of these), then the steps follow one another in registers. No
position is indexed at run time, so everything between is plain arithmetic.
exp(dt A) is a power of two: A comes multiplied by log2(e). Positions from T on load dt = 0 and change nothing.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(ptr, base, t, T, stride: tl.constexpr, at, is_in, U: tl.constexpr):
    """U rows from position t on, `stride` apart, as a tuple; zeros from T on."""
    rows = ()
    for i in tl.static_range(U):
        rows += (tl.load(ptr + base + (t + i) * stride + at, mask=is_in & (t + i < T), other=0.0),)
    return rows


@triton.jit
def widened(rows, U: tl.constexpr):
    """The rows as float32: apart from the loads, because it waits for them."""
    wide = ()
    for i in tl.static_range(U):
        wide += (rows[i].to(tl.float32),)
    return wide


@triton.jit
def scan_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, start_ptr, y_ptr, kept_ptr, end_ptr,
    T: tl.constexpr, E: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCK_E: tl.constexpr, U: tl.constexpr,
    STEPS: tl.constexpr, EVERY: tl.constexpr, WITH_Y: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Outputs and states of STEPS positions, of one batch entry, segment of time and channel block.

    x, dt and y [B, T, E], b and c [B, T, N], start and end [B, S, E, N] for the S segments of STEPS positions. With
    KEEP the state before every EVERY-th position goes to kept [B, T / EVERY, E, N]; without WITH_Y y stays unwritten.
    """
    n_blocks: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    n_segments: tl.constexpr = (T + STEPS - 1) // STEPS
    n_kept: tl.constexpr = (T + EVERY - 1) // EVERY
    pid = tl.program_id(0)
    segment = pid // n_blocks
    b = (segment // n_segments).to(tl.int64)
    e_E = pid % n_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    n_N = tl.arange(0, NP)
    is_E, is_N = e_E < E, n_N < N
    is_EN = is_E[:, None] & is_N[None, :]
    at_EN = e_E[:, None] * N + n_N[None, :]
    a_EN = tl.load(a_ptr + at_EN, mask=is_EN, other=0.0)
    h_EN = tl.load(start_ptr + segment.to(tl.int64) * (E * N) + at_EN, mask=is_EN, other=0.0)
    d_E = tl.load(d_ptr + e_E, mask=is_E, other=0.0)
    at_x, at_b = b * (T * E), b * (T * N)
    first = segment % n_segments * STEPS
    next_xs = load_rows(x_ptr, at_x, first, T, E, e_E, is_E, U)
    next_dts = load_rows(dt_ptr, at_x, first, T, E, e_E, is_E, U)
    next_bs = load_rows(b_ptr, at_b, first, T, N, n_N, is_N, U)
    next_cs = load_rows(c_ptr, at_b, first, T, N, n_N, is_N, U)
    for t in tl.range(first, first + STEPS, U):
        xs, dts, bs, cs = widened(next_xs, U), next_dts, widened(next_bs, U), widened(next_cs, U)
        next_xs = load_rows(x_ptr, at_x, t + U, T, E, e_E, is_E, U)
        next_dts = load_rows(dt_ptr, at_x, t + U, T, E, e_E, is_E, U)
        next_bs = load_rows(b_ptr, at_b, t + U, T, N, n_N, is_N, U)
        next_cs = load_rows(c_ptr, at_b, t + U, T, N, n_N, is_N, U)
        if KEEP:  # noqa: SIM102 - a constant, unlike the position
            if t % EVERY == 0:
                tl.store(kept_ptr + (b * n_kept + t // EVERY) * (E * N) + at_EN, h_EN, mask=is_EN & (t < T))
        for i in tl.static_range(U):
            h_EN = tl.exp2(dts[i][:, None] * a_EN) * h_EN + (dts[i] * xs[i])[:, None] * bs[i][None, :]
            if WITH_Y:
                y_E = tl.sum(h_EN * cs[i][None, :], 1) + d_E * xs[i]
                at_y = at_x + (t + i) * E + e_E
                tl.store(y_ptr + at_y, y_E.to(y_ptr.dtype.element_ty), mask=is_E & (t + i < T))
    tl.store(end_ptr + segment.to(tl.int64) * (E * N) + at_EN, h_EN, mask=is_EN)
