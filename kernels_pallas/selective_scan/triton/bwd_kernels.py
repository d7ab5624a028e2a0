"""Triton kernels of the selective scan's gradient, from the last position to the first.

    scan_bwd   the gradients of a segment of time, a chunk of STEPS positions at a time: from the kept state forward once,
               which leaves the state before every U positions in a buffer of the program's own, then back U positions
               at a time, whose states are made again in registers
    needed     first, where time has several segments: what each adds to the gradient of the state before it

Where it has, the gradient after every segment follows from the segments after it (state_scan's elementwise form). Sums
over channels are sums over blocks of them, added up by XLA: no atomics, so two runs give the same bits.
"""

import triton
import triton.language as tl

from kernels_pallas.selective_scan.triton.fwd_kernels import load_rows, widened
from kernels_pallas.triton.tile_io import LN2


@triton.jit
def needed_kernel(
    dt_ptr, a_ptr, c_ptr, dy_ptr, needed_ptr, decay_ptr,
    T: tl.constexpr, E: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCK_E: tl.constexpr, U: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """needed = sum_t (a_1 ... a_t) dy_t C_t of every segment of STEPS positions, the gradient of its start without that
    of its end, and its decay a_1 ... a_STEPS, both [B, S, E, N].
    """
    n_blocks: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    n_segments: tl.constexpr = (T + STEPS - 1) // STEPS
    pid = tl.program_id(0)
    segment = (pid // n_blocks).to(tl.int64)
    b, first = segment // n_segments, (pid // n_blocks) % n_segments * STEPS
    e_E = pid % n_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    n_N = tl.arange(0, NP)
    is_E, is_N = e_E < E, n_N < N
    is_EN = is_E[:, None] & is_N[None, :]
    at_EN = e_E[:, None] * N + n_N[None, :]
    a_EN = tl.load(a_ptr + at_EN, mask=is_EN, other=0.0)
    needed_EN = tl.zeros([BLOCK_E, NP], tl.float32)
    total_E = tl.zeros([BLOCK_E], tl.float32)
    at_x, at_b = b * (T * E), b * (T * N)
    for back in tl.range(0, STEPS // U):
        t = first + STEPS - U - back * U
        dts = load_rows(dt_ptr, at_x, t, T, E, e_E, is_E, U)
        dys = load_rows(dy_ptr, at_x, t, T, E, e_E, is_E, U)
        cs = load_rows(c_ptr, at_b, t, T, N, n_N, is_N, U)
        dys, cs = widened(dys, U), widened(cs, U)
        for i in tl.static_range(U - 1, -1, -1):
            needed_EN = tl.exp2(dts[i][:, None] * a_EN) * (needed_EN + dys[i][:, None] * cs[i][None, :])
            total_E += dts[i]
    tl.store(needed_ptr + segment * (E * N) + at_EN, needed_EN, mask=is_EN)
    tl.store(decay_ptr + segment * (E * N) + at_EN, tl.exp2(total_E[:, None] * a_EN), mask=is_EN)


@triton.jit
def scan_bwd_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, dy_ptr, kept_ptr, d_ends_ptr,
    dx_ptr, ddt_ptr, da_ptr, db_ptr, dc_ptr, dd_ptr, d_starts_ptr, states_ptr,
    T: tl.constexpr, E: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCK_E: tl.constexpr, U: tl.constexpr,
    STEPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Gradients dx and ddt [B, T, E] of CHUNKS chunks of STEPS positions, of one batch entry and channel block; parts of
    the sums: da [B, S, E, N], db and dc [B, blocks, T, N], dd [B, S, E], for the S segments of CHUNKS chunks.

    kept [B, c, E, N], the states before the chunks; d_ends and d_starts [B, S, E, N], the gradients of the states after
    and before each segment. states [programs, STEPS / U, BLOCK_E, NP] is what a program notes for itself; so that it
    stays in the L2 cache, every chunk takes the same place.
    """
    n_blocks: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    n_chunks: tl.constexpr = (T + STEPS - 1) // STEPS
    n_segments: tl.constexpr = (n_chunks + CHUNKS - 1) // CHUNKS
    pid = tl.program_id(0)
    segment = (pid // n_blocks).to(tl.int64)
    b, first = segment // n_segments, (pid // n_blocks) % n_segments * CHUNKS
    own_E, n_N = tl.arange(0, BLOCK_E), tl.arange(0, NP)
    e_E = pid % n_blocks * BLOCK_E + own_E
    is_E, is_N = e_E < E, n_N < N
    is_EN = is_E[:, None] & is_N[None, :]
    at_EN = e_E[:, None] * N + n_N[None, :]
    a_EN = tl.load(a_ptr + at_EN, mask=is_EN, other=0.0)
    grad_EN = tl.load(d_ends_ptr + segment * (E * N) + at_EN, mask=is_EN, other=0.0)
    d_E = tl.load(d_ptr + e_E, mask=is_E, other=0.0)
    da_EN = tl.zeros([BLOCK_E, NP], tl.float32)
    dd_E = tl.zeros([BLOCK_E], tl.float32)
    at_x, at_b = b * (T * E), b * (T * N)
    at_part = (b * n_blocks + pid % n_blocks) * (T * N)
    state_ptrs = states_ptr + pid.to(tl.int64) * (STEPS // U * BLOCK_E * NP) + own_E[:, None] * NP + n_N[None, :]
    for back_chunk in tl.range(0, CHUNKS):
        chunk = first + CHUNKS - 1 - back_chunk
        is_kept = is_EN & (chunk < n_chunks)
        h_EN = tl.load(kept_ptr + (b * n_chunks + chunk) * (E * N) + at_EN, mask=is_kept, other=0.0)
        tl.store(state_ptrs, h_EN)
        for block in tl.range(1, STEPS // U):
            t = chunk * STEPS + (block - 1) * U
            xs = load_rows(x_ptr, at_x, t, T, E, e_E, is_E, U)
            dts = load_rows(dt_ptr, at_x, t, T, E, e_E, is_E, U)
            bs = load_rows(b_ptr, at_b, t, T, N, n_N, is_N, U)
            xs, bs = widened(xs, U), widened(bs, U)
            for i in tl.static_range(U):
                h_EN = tl.exp2(dts[i][:, None] * a_EN) * h_EN + (dts[i] * xs[i])[:, None] * bs[i][None, :]
            tl.store(state_ptrs + block * (BLOCK_E * NP), h_EN)
        tl.debug_barrier()  # a thread may read what another has written
        for back in tl.range(0, STEPS // U):
            block = STEPS // U - 1 - back
            t = chunk * STEPS + block * U
            h_EN = tl.load(state_ptrs + block * (BLOCK_E * NP))
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
        tl.debug_barrier()  # all has been read before the next chunk takes its place
    tl.store(da_ptr + segment * (E * N) + at_EN, da_EN, mask=is_EN)
    tl.store(dd_ptr + segment * E + e_E, dd_E, mask=is_E)
    tl.store(d_starts_ptr + segment * (E * N) + at_EN, grad_EN, mask=is_EN)
