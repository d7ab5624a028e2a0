"""Triton backward kernels of the selective scan: last position to first.

    kernel     one program per                          writes
    needed     batch entry, segment, channel block      needed, decay (only with several segments)
    scan_bwd   batch entry, segment, channel block      all gradients

    operand                shape                   dtype    meaning
    x, dt, dy, dx, ddt     [B, T, E]               input    inputs, step sizes, output gradient; gradients
    a, b, c, d, bias       as in fwd_kernels.py    fp32
    kept                   [B, c, E, N]            fp32     states before the chunks
    d_ends, d_starts       [B, S, E, N]            fp32     state gradients after and before each of S segments
    needed, decay          [B, S, E, N]            fp32     a segment's contribution to d_starts, its total decay
    da;  dd, d_bias        [B, S, E, N]; [B, S, E] fp32     parts, summed within a segment
    db, dc                 [B, blocks, T, N]       fp32     parts, summed within a channel block
    states                 [programs, STEPS / U, BLOCK_E, NP] fp32, a private buffer per program

`scan_bwd` handles one chunk of STEPS positions at a time. It goes forward from the kept state, stores the state before
every U positions in its buffer and computes dC. Then it goes back and recomputes the states of U positions in
registers. Every chunk reuses the same buffer, which therefore stays in the L2 cache. This single pass replaced three
kernels and raised Mamba-1's training from 258k to 270k tokens/s on H200s (lab/log/kernels.md). With several segments,
the gradients after the segments follow from `needed` and `decay` by state_scan's elementwise form. XLA adds the parts.
No atomics are used: two runs give equal bits. Equations and source: `selective_scan/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.selective_scan.triton.tile_kernels import (
    load_rows,
    over_channels,
    over_states,
    part_over_channels,
    part_over_states,
    softplus_slope,
    split_rows,
    step_sizes,
)
from kernels_pallas.triton.tile_io import LN2, load_tile, store_tile


@triton.jit
def needed_kernel(
    dt_ptr, a_ptr, c_ptr, bias_ptr, dy_ptr, needed_ptr, decay_ptr,
    T: tl.constexpr, E: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCK_E: tl.constexpr, U: tl.constexpr,
    LANES_E: tl.constexpr, LANES_N: tl.constexpr, SOFTPLUS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute each segment's contribution to the gradient of its start state.

    needed = sum_t (a_1 ... a_t) dy_t C_t and decay = a_1 ... a_STEPS over STEPS positions, both [B, S, E, N]. The
    gradient from the end of the segment is not included.
    """
    n_blocks: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    n_segments: tl.constexpr = (T + STEPS - 1) // STEPS
    pid = tl.program_id(0)
    segment = (pid // n_blocks).to(tl.int64)
    b, first = segment // n_segments, (pid // n_blocks) % n_segments * STEPS
    e_E = pid % n_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    n_N, i_U = tl.arange(0, NP), tl.arange(0, U)
    is_EN = (e_E < E)[:, None] & (n_N < N)[None, :]
    at_EN = e_E[:, None] * N + n_N[None, :]
    a_EN = tl.load(a_ptr + at_EN, mask=is_EN, other=0.0)
    bias_E = tl.load(bias_ptr + e_E, mask=e_E < E, other=0.0)
    grad_EN = tl.zeros([BLOCK_E, NP], tl.float32)
    total_EU = tl.zeros([BLOCK_E, U], tl.float32)
    at_x, at_b = b * (T * E), b * (T * N)
    for back in tl.range(0, STEPS // U):
        t = first + STEPS - U - back * U
        dt_EU = load_tile(dt_ptr + at_x, e_E, t + i_U, 1, E, E, T, True, True)
        dt_EU = step_sizes(dt_EU, bias_E, t + i_U, T, SOFTPLUS)
        dy_EU = load_tile(dy_ptr + at_x, e_E, t + i_U, 1, E, E, T, True, True).to(tl.float32)
        cs = load_rows(c_ptr + at_b, t, T, N, n_N, U)
        dts, dys = split_rows(dt_EU, U), split_rows(dy_EU, U)
        for i in tl.static_range(U - 1, -1, -1):
            grad_EN = tl.exp2(dts[i][:, None] * a_EN) * (grad_EN + dys[i][:, None] * cs[i][None, :])
        total_EU += dt_EU
    decay_EN = tl.exp2(tl.sum(total_EU, 1)[:, None] * a_EN)
    tl.store(needed_ptr + segment * (E * N) + at_EN, grad_EN, mask=is_EN)
    tl.store(decay_ptr + segment * (E * N) + at_EN, decay_EN, mask=is_EN)


@triton.jit
def load_tiles(
    x_ptr, dt_ptr, dy_ptr, e_E, t_U, T: tl.constexpr, E: tl.constexpr, CUT_E: tl.constexpr, CUT_T: tl.constexpr
):  # fmt: skip
    """Return x, dt and dy [BLOCK_E, U] unconverted: a conversion waits for its load."""
    x_EU = load_tile(x_ptr, e_E, t_U, 1, E, E, T, CUT_E, CUT_T)
    dt_EU = load_tile(dt_ptr, e_E, t_U, 1, E, E, T, CUT_E, CUT_T)
    dy_EU = load_tile(dy_ptr, e_E, t_U, 1, E, E, T, CUT_E, CUT_T)
    return x_EU, dt_EU, dy_EU


@triton.jit
def scan_bwd_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, bias_ptr, dy_ptr, kept_ptr, d_ends_ptr,
    dx_ptr, ddt_ptr, da_ptr, db_ptr, dc_ptr, dd_ptr, d_bias_ptr, d_starts_ptr, states_ptr,
    T: tl.constexpr, E: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCK_E: tl.constexpr, U: tl.constexpr,
    LANES_E: tl.constexpr, LANES_N: tl.constexpr, SOFTPLUS: tl.constexpr, STEPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of CHUNKS chunks of STEPS positions.

    One program handles one batch entry, segment and channel block. `CUT_E` and `CUT_T` mark partial blocks and chunks.
    """
    n_blocks: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    n_chunks: tl.constexpr = (T + STEPS - 1) // STEPS
    n_segments: tl.constexpr = (n_chunks + CHUNKS - 1) // CHUNKS
    CUT_E: tl.constexpr = E % BLOCK_E != 0
    CUT_T: tl.constexpr = T % (CHUNKS * STEPS) != 0
    pid = tl.program_id(0)
    segment = (pid // n_blocks).to(tl.int64)
    b, first = segment // n_segments, (pid // n_blocks) % n_segments * CHUNKS
    own_E, n_N, i_U = tl.arange(0, BLOCK_E), tl.arange(0, NP), tl.arange(0, U)
    e_E = pid % n_blocks * BLOCK_E + own_E
    is_E = e_E < E
    is_EN = is_E[:, None] & (n_N < N)[None, :]
    at_EN = e_E[:, None] * N + n_N[None, :]
    a_EN = tl.load(a_ptr + at_EN, mask=is_EN, other=0.0)
    grad_EN = tl.load(d_ends_ptr + segment * (E * N) + at_EN, mask=is_EN, other=0.0)
    d_E = tl.load(d_ptr + e_E, mask=is_E, other=0.0)
    bias_E = tl.load(bias_ptr + e_E, mask=is_E, other=0.0)
    da_EN = tl.zeros([BLOCK_E, NP], tl.float32)
    dd_EU = tl.zeros([BLOCK_E, U], tl.float32)
    d_bias_EU = tl.zeros([BLOCK_E, U], tl.float32)
    at_x, at_b = b * (T * E), b * (T * N)
    at_part = (b * n_blocks + pid % n_blocks) * (T * N)
    state_ptrs = states_ptr + pid.to(tl.int64) * (STEPS // U * BLOCK_E * NP) + own_E[:, None] * NP + n_N[None, :]
    for back_chunk in tl.range(0, CHUNKS):
        chunk = first + CHUNKS - 1 - back_chunk
        is_kept = is_EN & (chunk < n_chunks)
        h_EN = tl.load(kept_ptr + (b * n_chunks + chunk) * (E * N) + at_EN, mask=is_kept, other=0.0)
        next_EU = load_tiles(x_ptr + at_x, dt_ptr + at_x, dy_ptr + at_x, e_E, chunk * STEPS + i_U, T, E, CUT_E, CUT_T)
        next_bs = load_rows(b_ptr + at_b, chunk * STEPS, T, N, n_N, U)
        for block in tl.range(0, STEPS // U):
            t = chunk * STEPS + block * U
            x_EU, dy_EU = next_EU[0].to(tl.float32), next_EU[2].to(tl.float32)
            dt_EU = step_sizes(next_EU[1], bias_E, t + i_U, T, SOFTPLUS)
            ahead = chunk * STEPS + tl.minimum(block + 1, STEPS // U - 1) * U
            next_EU = load_tiles(x_ptr + at_x, dt_ptr + at_x, dy_ptr + at_x, e_E, ahead + i_U, T, E, CUT_E, CUT_T)
            bs, next_bs = next_bs, load_rows(b_ptr + at_b, ahead, T, N, n_N, U)
            tl.store(state_ptrs + block * (BLOCK_E * NP), h_EN)
            dts, dtxs, dys = split_rows(dt_EU, U), split_rows(dt_EU * x_EU, U), split_rows(dy_EU, U)
            dcs = ()
            for i in tl.static_range(U):
                h_EN = tl.exp2(dts[i][:, None] * a_EN) * h_EN + dtxs[i][:, None] * bs[i][None, :]
                dcs += (part_over_channels(h_EN * dys[i][:, None], LANES_E),)
            store_tile(dc_ptr + at_part, n_N, t + i_U, 1, N, N, T, over_channels(dcs, LANES_E, U))
        tl.debug_barrier()  # a thread may read another thread's writes
        next_cs = load_rows(c_ptr + at_b, chunk * STEPS + STEPS - U, T, N, n_N, U)
        next_h_EN = tl.load(state_ptrs + (STEPS // U - 1) * (BLOCK_E * NP))
        for back in tl.range(0, STEPS // U):
            block = STEPS // U - 1 - back
            t = chunk * STEPS + block * U
            x_EU, given_EU, dy_EU = next_EU[0].to(tl.float32), next_EU[1], next_EU[2].to(tl.float32)
            dt_EU = step_sizes(given_EU, bias_E, t + i_U, T, SOFTPLUS)
            ahead = chunk * STEPS + tl.maximum(block - 1, 0) * U
            next_EU = load_tiles(x_ptr + at_x, dt_ptr + at_x, dy_ptr + at_x, e_E, ahead + i_U, T, E, CUT_E, CUT_T)
            bs, next_bs = next_bs, load_rows(b_ptr + at_b, ahead, T, N, n_N, U)
            cs, next_cs = next_cs, load_rows(c_ptr + at_b, ahead, T, N, n_N, U)
            hs = (next_h_EN,)
            next_h_EN = tl.load(state_ptrs + tl.maximum(block - 1, 0) * (BLOCK_E * NP))
            dts, dtxs, dys = split_rows(dt_EU, U), split_rows(dt_EU * x_EU, U), split_rows(dy_EU, U)
            decays = (tl.exp2(dts[0][:, None] * a_EN),)
            for i in tl.static_range(U - 1):
                hs += (decays[i] * hs[i] + dtxs[i][:, None] * bs[i][None, :],)
                decays += (tl.exp2(dts[i + 1][:, None] * a_EN),)
            dbs = ()
            grad_bs = ()
            throughs = ()
            for i in tl.static_range(U - 1, -1, -1):
                grad_EN += dys[i][:, None] * cs[i][None, :]
                db_EN, grad_b_EN = grad_EN * dtxs[i][:, None], grad_EN * bs[i][None, :]
                grad_EN *= decays[i]
                through_EN = grad_EN * hs[i]
                # Positions run backward, so new parts go first; Triton supports no star.
                dbs = (part_over_channels(db_EN, LANES_E),) + dbs  # noqa: RUF005
                grad_bs = (part_over_states(grad_b_EN, LANES_N),) + grad_bs  # noqa: RUF005
                throughs = (part_over_states(through_EN * a_EN, LANES_N),) + throughs  # noqa: RUF005
                da_EN += through_EN * dts[i][:, None]
            store_tile(db_ptr + at_part, n_N, t + i_U, 1, N, N, T, over_channels(dbs, LANES_E, U))
            grad_b_EU = over_states(grad_bs, LANES_N, U)
            ddt_EU = over_states(throughs, LANES_N, U) * LN2 + grad_b_EU * x_EU
            if SOFTPLUS:
                ddt_EU *= softplus_slope(given_EU, bias_E, t + i_U, T)
                d_bias_EU += ddt_EU
            store_tile(dx_ptr + at_x, e_E, t + i_U, 1, E, E, T, grad_b_EU * dt_EU + d_E[:, None] * dy_EU)
            store_tile(ddt_ptr + at_x, e_E, t + i_U, 1, E, E, T, ddt_EU)
            dd_EU += dy_EU * x_EU
        tl.debug_barrier()  # finish all reads before the next chunk overwrites the buffer
    tl.store(da_ptr + segment * (E * N) + at_EN, da_EN, mask=is_EN)
    tl.store(dd_ptr + segment * E + e_E, tl.sum(dd_EU, 1), mask=is_E)
    if SOFTPLUS:
        tl.store(d_bias_ptr + segment * E + e_E, tl.sum(d_bias_EU, 1), mask=is_E)
    tl.store(d_starts_ptr + segment * (E * N) + at_EN, grad_EN, mask=is_EN)
