"""Triton kernels of the selective scan's gradient. Time is cut into chunks of STEPS positions that run side by side.

    chunk_states   states every U positions, and what a chunk adds to the gradient of the state before it
    scan_bwd       the positions of a chunk from the last, U at a time: their states are made again in registers

Between the two the gradient after every chunk follows from the chunks after it (state_scan's elementwise form). Sums
over channels are sums over blocks of them, added up by XLA: no atomics, so two runs give the same bits.
"""

import triton
import triton.language as tl

from kernels_pallas.selective_scan.triton.fwd_kernels import load_rows, widened
from kernels_pallas.triton.tile_io import LN2


@triton.jit
def chunk_states_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, dy_ptr, start_ptr, states_ptr, decay_ptr, needed_ptr,
    T: tl.constexpr, E: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCK_E: tl.constexpr, U: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """From start [B, c, E, N]: states [B, c STEPS / U, E, N] before every U positions; decay of the whole chunk and
    needed = sum_t (a_1 ... a_t) dy_t C_t, the gradient of its start without that of its end, both [B, c, E, N].
    """
    n_blocks: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    n_chunks: tl.constexpr = (T + STEPS - 1) // STEPS
    pid = tl.program_id(0)
    chunk = (pid // n_blocks).to(tl.int64)
    b, first = chunk // n_chunks, (pid // n_blocks) % n_chunks * STEPS
    e_E = pid % n_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    n_N = tl.arange(0, NP)
    is_E, is_N = e_E < E, n_N < N
    is_EN = is_E[:, None] & is_N[None, :]
    at_EN = e_E[:, None] * N + n_N[None, :]
    a_EN = tl.load(a_ptr + at_EN, mask=is_EN, other=0.0)
    h_EN = tl.load(start_ptr + chunk * (E * N) + at_EN, mask=is_EN, other=0.0)
    decay_EN = tl.full([BLOCK_E, NP], 1.0, tl.float32)
    needed_EN = tl.zeros([BLOCK_E, NP], tl.float32)
    at_x, at_b = b * (T * E), b * (T * N)
    for block in tl.range(0, STEPS // U):
        t = first + block * U
        tl.store(states_ptr + (chunk * (STEPS // U) + block) * (E * N) + at_EN, h_EN, mask=is_EN)
        xs = load_rows(x_ptr, at_x, t, T, E, e_E, is_E, U)
        dts = load_rows(dt_ptr, at_x, t, T, E, e_E, is_E, U)
        dys = load_rows(dy_ptr, at_x, t, T, E, e_E, is_E, U)
        bs = load_rows(b_ptr, at_b, t, T, N, n_N, is_N, U)
        cs = load_rows(c_ptr, at_b, t, T, N, n_N, is_N, U)
        xs, dys, bs, cs = widened(xs, U), widened(dys, U), widened(bs, U), widened(cs, U)
        for i in tl.static_range(U):
            decay_now_EN = tl.exp2(dts[i][:, None] * a_EN)
            h_EN = decay_now_EN * h_EN + (dts[i] * xs[i])[:, None] * bs[i][None, :]
            decay_EN *= decay_now_EN
            needed_EN += decay_EN * (dys[i][:, None] * cs[i][None, :])
    tl.store(decay_ptr + chunk * (E * N) + at_EN, decay_EN, mask=is_EN)
    tl.store(needed_ptr + chunk * (E * N) + at_EN, needed_EN, mask=is_EN)


@triton.jit
def scan_bwd_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, dy_ptr, states_ptr, d_ends_ptr,
    dx_ptr, ddt_ptr, da_ptr, db_ptr, dc_ptr, dd_ptr,
    T: tl.constexpr, E: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCK_E: tl.constexpr, U: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Gradients dx and ddt [B, T, E]; parts of the sums: da [B, c, E, N], db and dc [B, blocks, T, N], dd [B, c, E].

    states as `chunk_states_kernel` leaves them; d_ends [B, c, E, N], the gradient of the state after each chunk.
    """
    n_blocks: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    n_chunks: tl.constexpr = (T + STEPS - 1) // STEPS
    pid = tl.program_id(0)
    chunk = (pid // n_blocks).to(tl.int64)
    b, first = chunk // n_chunks, (pid // n_blocks) % n_chunks * STEPS
    e_E = pid % n_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    n_N = tl.arange(0, NP)
    is_E, is_N = e_E < E, n_N < N
    is_EN = is_E[:, None] & is_N[None, :]
    at_EN = e_E[:, None] * N + n_N[None, :]
    a_EN = tl.load(a_ptr + at_EN, mask=is_EN, other=0.0)
    grad_EN = tl.load(d_ends_ptr + chunk * (E * N) + at_EN, mask=is_EN, other=0.0)
    d_E = tl.load(d_ptr + e_E, mask=is_E, other=0.0)
    da_EN = tl.zeros([BLOCK_E, NP], tl.float32)
    dd_E = tl.zeros([BLOCK_E], tl.float32)
    at_x, at_b = b * (T * E), b * (T * N)
    at_part = (b * n_blocks + pid % n_blocks) * (T * N)
    for back in tl.range(0, STEPS // U):
        block = STEPS // U - 1 - back
        t = first + block * U
        h_EN = tl.load(states_ptr + (chunk * (STEPS // U) + block) * (E * N) + at_EN, mask=is_EN, other=0.0)
        xs = load_rows(x_ptr, at_x, t, T, E, e_E, is_E, U)
        dts = load_rows(dt_ptr, at_x, t, T, E, e_E, is_E, U)
        dys = load_rows(dy_ptr, at_x, t, T, E, e_E, is_E, U)
        bs = load_rows(b_ptr, at_b, t, T, N, n_N, is_N, U)
        cs = load_rows(c_ptr, at_b, t, T, N, n_N, is_N, U)
        xs, dys, bs, cs = widened(xs, U), widened(dys, U), widened(bs, U), widened(cs, U)
        hs = (h_EN,)
        decays = ()
        for i in tl.static_range(U):
            decays += (tl.exp2(dts[i][:, None] * a_EN),)
            hs += (decays[i] * hs[i] + (dts[i] * xs[i])[:, None] * bs[i][None, :],)
        for i in tl.static_range(U - 1, -1, -1):
            grad_EN += dys[i][:, None] * cs[i][None, :]
            dc_N = tl.sum(hs[i + 1] * dys[i][:, None], 0)
            db_N = tl.sum(grad_EN * (dts[i] * xs[i])[:, None], 0)
            grad_b_E = tl.sum(grad_EN * bs[i][None, :], 1)
            grad_EN *= decays[i]
            through_EN = grad_EN * hs[i]
            ddt_E = tl.sum(through_EN * a_EN, 1) * LN2 + grad_b_E * xs[i]
            da_EN += through_EN * dts[i][:, None]
            dx_E = grad_b_E * dts[i] + d_E * dys[i]
            dd_E += dys[i] * xs[i]
            is_here = t + i < T
            tl.store(dx_ptr + at_x + (t + i) * E + e_E, dx_E.to(dx_ptr.dtype.element_ty), mask=is_E & is_here)
            tl.store(ddt_ptr + at_x + (t + i) * E + e_E, ddt_E, mask=is_E & is_here)
            tl.store(db_ptr + at_part + (t + i) * N + n_N, db_N, mask=is_N & is_here)
            tl.store(dc_ptr + at_part + (t + i) * N + n_N, dc_N, mask=is_N & is_here)
    tl.store(da_ptr + chunk * (E * N) + at_EN, da_EN, mask=is_EN)
    tl.store(dd_ptr + chunk * E + e_E, dd_E, mask=is_E)
