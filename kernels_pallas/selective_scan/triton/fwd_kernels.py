"""Triton forward kernel of the selective scan: states stay in registers.

    operand       shape                     dtype    meaning
    x, dt, y      [B, T, E]                 input    inputs, step sizes (fp32 without SOFTPLUS), outputs
    a             [E, N]                    fp32     A log2(e): exp(dt A) becomes a power of two
    b, c          [B, T, N]                 fp32     input and output weights
    d, bias       [E]                       fp32     skip weights; dt bias (SOFTPLUS)
    start, end    [B, S, E, N]              fp32     states before and after each of S segments
    kept          [B, T / EVERY, E, N]      fp32     states before every EVERY-th position (KEEP)

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t,   y_t = sum_n C_t h_t + D x_t

One program of one warp handles BLOCK_E channels in a batch entry and segment; its state is [BLOCK_E, NP]. It steps
through U positions at a time and loads the next U first, so the steps between are plain register arithmetic. No
position is indexed at run time. Positions from T on load dt = 0 and change nothing. B and C are float32, which saves
every program their conversion (1 of 14 instructions). Equations and source: `selective_scan/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.selective_scan.triton.tile_kernels import (
    load_rows,
    over_states,
    part_over_states,
    split_rows,
    step_sizes,
)
from kernels_pallas.triton.tile_io import load_tile, store_tile


@triton.jit
def scan_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, bias_ptr, start_ptr, y_ptr, kept_ptr, end_ptr,
    T: tl.constexpr, E: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCK_E: tl.constexpr, U: tl.constexpr,
    LANES_E: tl.constexpr, LANES_N: tl.constexpr, SOFTPLUS: tl.constexpr,
    STEPS: tl.constexpr, EVERY: tl.constexpr, WITH_Y: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Scan STEPS positions for one batch entry, time segment and channel block.

    WITH_Y writes y, KEEP writes kept. With SOFTPLUS the step sizes are softplus(dt + bias).
    """
    n_blocks: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    n_segments: tl.constexpr = (T + STEPS - 1) // STEPS
    n_kept: tl.constexpr = (T + EVERY - 1) // EVERY
    pid = tl.program_id(0)
    segment = pid // n_blocks
    b = (segment // n_segments).to(tl.int64)
    e_E = pid % n_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    n_N, i_U = tl.arange(0, NP), tl.arange(0, U)
    is_E = e_E < E
    is_EN = is_E[:, None] & (n_N < N)[None, :]
    at_EN = e_E[:, None] * N + n_N[None, :]
    a_EN = tl.load(a_ptr + at_EN, mask=is_EN, other=0.0)
    h_EN = tl.load(start_ptr + segment.to(tl.int64) * (E * N) + at_EN, mask=is_EN, other=0.0)
    d_E = tl.load(d_ptr + e_E, mask=is_E, other=0.0)
    bias_E = tl.load(bias_ptr + e_E, mask=is_E, other=0.0)
    at_x, at_b = b * (T * E), b * (T * N)
    first = segment % n_segments * STEPS
    next_x_EU = load_tile(x_ptr + at_x, e_E, first + i_U, 1, E, E, T, True, True)
    next_dt_EU = load_tile(dt_ptr + at_x, e_E, first + i_U, 1, E, E, T, True, True)
    next_bs = load_rows(b_ptr + at_b, first, T, N, n_N, U)
    next_cs = load_rows(c_ptr + at_b, first, T, N, n_N, U)
    for t in tl.range(first, first + STEPS, U, loop_unroll_factor=2):  # unroll by two: avoids copying the next values
        x_EU, bs, cs = next_x_EU.to(tl.float32), next_bs, next_cs
        dt_EU = step_sizes(next_dt_EU, bias_E, t + i_U, T, SOFTPLUS)
        next_x_EU = load_tile(x_ptr + at_x, e_E, t + U + i_U, 1, E, E, T, True, True)
        next_dt_EU = load_tile(dt_ptr + at_x, e_E, t + U + i_U, 1, E, E, T, True, True)
        next_bs = load_rows(b_ptr + at_b, t + U, T, N, n_N, U)
        next_cs = load_rows(c_ptr + at_b, t + U, T, N, n_N, U)
        if KEEP:  # noqa: SIM102 - KEEP is a constant, the position is not
            if t % EVERY == 0:
                tl.store(kept_ptr + (b * n_kept + t // EVERY) * (E * N) + at_EN, h_EN, mask=is_EN & (t < T))
        dts, dtxs = split_rows(dt_EU, U), split_rows(dt_EU * x_EU, U)
        ys = ()
        for i in tl.static_range(U):
            h_EN = tl.exp2(dts[i][:, None] * a_EN) * h_EN + dtxs[i][:, None] * bs[i][None, :]
            if WITH_Y:
                ys += (part_over_states(h_EN * cs[i][None, :], LANES_N),)
        if WITH_Y:
            y_EU = over_states(ys, LANES_N, U) + d_E[:, None] * x_EU
            store_tile(y_ptr + at_x, e_E, t + i_U, 1, E, E, T, y_EU)
    tl.store(end_ptr + segment.to(tl.int64) * (E * N) + at_EN, h_EN, mask=is_EN)
