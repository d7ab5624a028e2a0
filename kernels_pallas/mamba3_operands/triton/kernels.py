"""Triton kernels of Mamba-3's recurrence operands: one pass per direction, and sums over chunks.

    operand              shape               dtype    meaning
    b, c                 [B, T, N]           input    normed B and C, shared by the heads
    turn                 [B, T, R]           fp32     turns per step size, shared by the heads
    dt                   [B, T, H]           fp32     step sizes
    starts               [B, c, H, R]        fp32     angles before each chunk of TOKENS tokens, in turns
    biases               [B, 2, H, N]        fp32     biases of B and C
    first                [B, H, N]           input    the first token's key
    k, q                 [B, T, H, N]        input    results; k of token t is made from B and the angle of t - 1
    own                  [B, T, H]           fp32     result, (C + bias) . (B + bias)
    d_k, d_q, d_own      as the results               result gradients
    db, dc               [B, T, N]           fp32     gradients, summed over heads
    dturn, ddt           [B, T, R], [B, T, H]  fp32   gradients through the angles of the token's own chunk
    dstarts              [B, c, H, R]        fp32     gradients
    dbiases              [B, c, 2, H, N]     fp32     bias gradients, summed within each chunk

A program handles a chunk of TOKENS tokens and HEADS heads, one after the other. In the backward kernel it handles all
heads and sums over them in registers. Rotated channels form two tiles, even and odd, the remaining channels another
one; RP and SP are R and N - 2 R, padded to powers of two. B and C of a token are rotated by this token's angle, so a
program needs no other token's. Only the rows of k and of its gradient are one token later. Arithmetic is float32.
Equations and source: `mamba3_operands/api.py`.
"""

import triton
import triton.language as tl

TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def rotation(turns):
    """Return the cosine and sine of 2 pi turns.

    Taylor series within an eighth of a turn of the nearest quarter turn; the first omitted term is below 3e-9.
    """
    quarter = tl.floor(turns * 4.0 + 0.5)
    x = (turns - quarter * 0.25) * TWO_PI
    z = x * x
    sin = x * (1.0 + z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880)))))
    cos = 1.0 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800)))))
    n = quarter.to(tl.int32) & 3
    is_odd = (n & 1) == 1
    turned_cos, turned_sin = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    return tl.where((n == 1) | (n == 2), -turned_cos, turned_cos), tl.where(n >= 2, -turned_sin, turned_sin)


@triton.jit
def load_masked(ptr, row_R, n, stride: tl.constexpr, n_rows, N: tl.constexpr):
    """Return columns `n` of rows `row_R` in float32; zeros from row `n_rows` and column N on."""
    mask = (row_R < n_rows)[:, None] & (n < N)[None, :]
    return tl.load(ptr + row_R[:, None] * stride + n[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def pairs(x_RN, ROWS: tl.constexpr, RP: tl.constexpr):
    """Return the even and the odd columns."""
    return tl.split(tl.reshape(x_RN, (ROWS, RP, 2)))


@triton.jit
def store_masked(ptr, row_R, n, stride: tl.constexpr, n_rows, N: tl.constexpr, x_RN):
    """Write columns `n` of rows `row_R`, up to row `n_rows` and column N."""
    mask = (row_R < n_rows)[:, None] & (n < N)[None, :]
    tl.store(ptr + row_R[:, None] * stride + n[None, :], x_RN.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def joined(even, odd, ROWS: tl.constexpr, RP: tl.constexpr):
    """Return the tile with these even and odd columns."""
    return tl.reshape(tl.join(even, odd), (ROWS, 2 * RP))


@triton.jit
def steps_of(turn_TR, dt_T):
    """Return the turns of each step, in [-1/2, 1/2], for precise sums."""
    step_TR = turn_TR * dt_T[:, None]
    return step_TR - tl.floor(step_TR + 0.5)


@triton.jit
def sums_kernel(
    x_ptr, start_ptr, sums_ptr, last_ptr,
    N_CHUNKS: tl.constexpr, H: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Add x [B, c, H, R] over the chunks before each chunk, from `start`, modulo 1; `last` is the sum over all chunks.

    With REVERSE, add the chunks after each chunk, not modulo 1. One program handles a head.
    """
    pid = tl.program_id(0)
    h, entry = pid % H, (pid // H).to(tl.int64)
    r = tl.arange(0, RP)
    sum_R = tl.load(start_ptr + pid * R + r, mask=r < R, other=0.0)
    from_first: tl.constexpr = -1 if REVERSE else 1
    for step in range(0, N_CHUNKS, BLOCK):
        at = step + tl.arange(0, BLOCK)
        chunk = N_CHUNKS - 1 - at if REVERSE else at
        places = (entry * N_CHUNKS + chunk)[:, None] * (H * R) + h * R + r[None, :]
        mask = (at < N_CHUNKS)[:, None] & (r < R)[None, :]
        # Read the chunk before each chunk, because x + y - y is not x: results must not depend on later tokens.
        before_CR = tl.load(x_ptr + places - from_first * H * R, mask=mask & (at > step)[:, None], other=0.0)
        sums_CR = sum_R[None, :] + tl.cumsum(before_CR, 0)
        sum_R += tl.sum(tl.load(x_ptr + places, mask=mask, other=0.0), 0)
        if not REVERSE:
            sums_CR -= tl.floor(sums_CR)
            sum_R -= tl.floor(sum_R)
        tl.store(sums_ptr + places, sums_CR, mask=mask)
    tl.store(last_ptr + pid * R + r, sum_R, mask=r < R)


@triton.jit
def forward_kernel(
    b_ptr, c_ptr, turn_ptr, dt_ptr, starts_ptr, biases_ptr, first_ptr, k_ptr, q_ptr, own_ptr,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr,
    NP: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the results of a chunk for HEADS heads."""
    n_chunks: tl.constexpr = (T + TOKENS - 1) // TOKENS
    n_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    group, chunk, entry = pid % n_groups, pid // n_groups % n_chunks, (pid // (n_groups * n_chunks)).to(tl.int64)
    t = chunk * TOKENS + tl.arange(0, TOKENS)
    r, pair, rest = tl.arange(0, RP), tl.arange(0, 2 * RP), 2 * R + tl.arange(0, SP)
    turn_TR = load_masked(turn_ptr + entry * (T * R), t, r, R, T, R)
    b_even_TR, b_odd_TR = pairs(load_masked(b_ptr + entry * (T * N), t, pair, N, T, 2 * R), TOKENS, RP)
    c_even_TR, c_odd_TR = pairs(load_masked(c_ptr + entry * (T * N), t, pair, N, T, 2 * R), TOKENS, RP)
    if N > 2 * R:
        b_rest_TS = load_masked(b_ptr + entry * (T * N), t, rest, N, T, N)
        c_rest_TS = load_masked(c_ptr + entry * (T * N), t, rest, N, T, N)
    for h in tl.range(group * HEADS, tl.minimum(group * HEADS + HEADS, H), num_stages=STAGES):
        of_head = entry * (T * H * N) + h * N
        b_bias_ptr = biases_ptr + (entry * 2 * H + h) * N
        c_bias_ptr = b_bias_ptr + H * N
        dt_T = tl.load(dt_ptr + entry * (T * H) + t * H + h, mask=t < T, other=0.0)
        start_R = tl.load(starts_ptr + ((entry * n_chunks + chunk) * H + h) * R + r, mask=r < R, other=0.0)
        cos_TR, sin_TR = rotation(start_R[None, :] + tl.cumsum(steps_of(turn_TR, dt_T), 0))
        even_TR = b_even_TR + tl.load(b_bias_ptr + 2 * r, mask=r < R, other=0.0)[None, :]
        odd_TR = b_odd_TR + tl.load(b_bias_ptr + 2 * r + 1, mask=r < R, other=0.0)[None, :]
        turned = joined(even_TR * cos_TR - odd_TR * sin_TR, even_TR * sin_TR + odd_TR * cos_TR, TOKENS, RP)
        store_masked(k_ptr + of_head, t + 1, pair, H * N, T, 2 * R, turned)
        c_even_HR = c_even_TR + tl.load(c_bias_ptr + 2 * r, mask=r < R, other=0.0)[None, :]
        c_odd_HR = c_odd_TR + tl.load(c_bias_ptr + 2 * r + 1, mask=r < R, other=0.0)[None, :]
        own_T = tl.sum(even_TR * c_even_HR + odd_TR * c_odd_HR, 1)
        turned = joined(c_even_HR * cos_TR - c_odd_HR * sin_TR, c_even_HR * sin_TR + c_odd_HR * cos_TR, TOKENS, RP)
        store_masked(q_ptr + of_head, t, pair, H * N, T, 2 * R, turned)
        if N > 2 * R:
            b_TS = b_rest_TS + tl.load(b_bias_ptr + rest, mask=rest < N, other=0.0)[None, :]
            c_TS = c_rest_TS + tl.load(c_bias_ptr + rest, mask=rest < N, other=0.0)[None, :]
            own_T += tl.sum(b_TS * c_TS, 1)
            store_masked(k_ptr + of_head, t + 1, rest, H * N, T, N, b_TS)
            store_masked(q_ptr + of_head, t, rest, H * N, T, N, c_TS)
        tl.store(own_ptr + entry * (T * H) + t * H + h, own_T, mask=t < T)
        n = tl.arange(0, NP)
        first_N = tl.load(first_ptr + (entry * H + h) * N + n, mask=n < N, other=0.0)
        tl.store(k_ptr + of_head + n, first_N, mask=(n < N) & (chunk == 0))


@triton.jit
def backward_kernel(
    b_ptr, c_ptr, turn_ptr, dt_ptr, starts_ptr, biases_ptr, d_k_ptr, d_q_ptr, d_own_ptr,
    db_ptr, dc_ptr, dturn_ptr, ddt_ptr, dstarts_ptr, dbiases_ptr,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk, except those through later chunks' angles.

    These follow from `dstarts`. The gradient of the first token's key is not included.
    """
    n_chunks: tl.constexpr = (T + TOKENS - 1) // TOKENS
    pid = tl.program_id(0)
    chunk, entry = pid % n_chunks, (pid // n_chunks).to(tl.int64)
    t = chunk * TOKENS + tl.arange(0, TOKENS)
    r, pair, rest = tl.arange(0, RP), tl.arange(0, 2 * RP), 2 * R + tl.arange(0, SP)
    turn_TR = load_masked(turn_ptr + entry * (T * R), t, r, R, T, R)
    b_even_TR, b_odd_TR = pairs(load_masked(b_ptr + entry * (T * N), t, pair, N, T, 2 * R), TOKENS, RP)
    c_even_TR, c_odd_TR = pairs(load_masked(c_ptr + entry * (T * N), t, pair, N, T, 2 * R), TOKENS, RP)
    dturn_TR = tl.zeros([TOKENS, RP], tl.float32)
    db_even_TR, db_odd_TR, dc_even_TR, dc_odd_TR = dturn_TR, dturn_TR, dturn_TR, dturn_TR
    if N > 2 * R:
        b_rest_TS = load_masked(b_ptr + entry * (T * N), t, rest, N, T, N)
        c_rest_TS = load_masked(c_ptr + entry * (T * N), t, rest, N, T, N)
        db_rest_TS = tl.zeros([TOKENS, SP], tl.float32)
        dc_rest_TS = db_rest_TS
    for h in tl.range(0, H, num_stages=STAGES):
        of_head = entry * (T * H * N) + h * N
        b_bias_ptr = biases_ptr + (entry * 2 * H + h) * N
        c_bias_ptr = b_bias_ptr + H * N
        db_bias_ptr = dbiases_ptr + ((entry * n_chunks + chunk) * 2 * H + h) * N
        dc_bias_ptr = db_bias_ptr + H * N
        of_start = ((entry * n_chunks + chunk) * H + h) * R
        dk_even_TR, dk_odd_TR = pairs(load_masked(d_k_ptr + of_head, t + 1, pair, H * N, T, 2 * R), TOKENS, RP)
        dq_even_TR, dq_odd_TR = pairs(load_masked(d_q_ptr + of_head, t, pair, H * N, T, 2 * R), TOKENS, RP)
        dt_T = tl.load(dt_ptr + entry * (T * H) + t * H + h, mask=t < T, other=0.0)
        d_own_T1 = tl.load(d_own_ptr + entry * (T * H) + t * H + h, mask=t < T, other=0.0)[:, None]
        start_R = tl.load(starts_ptr + of_start + r, mask=r < R, other=0.0)
        cos_TR, sin_TR = rotation(start_R[None, :] + tl.cumsum(steps_of(turn_TR, dt_T), 0))
        even_TR = b_even_TR + tl.load(b_bias_ptr + 2 * r, mask=r < R, other=0.0)[None, :]
        odd_TR = b_odd_TR + tl.load(b_bias_ptr + 2 * r + 1, mask=r < R, other=0.0)[None, :]
        c_even_HR = c_even_TR + tl.load(c_bias_ptr + 2 * r, mask=r < R, other=0.0)[None, :]
        c_odd_HR = c_odd_TR + tl.load(c_bias_ptr + 2 * r + 1, mask=r < R, other=0.0)[None, :]

        back_even_TR = dk_even_TR * cos_TR + dk_odd_TR * sin_TR
        back_odd_TR = dk_odd_TR * cos_TR - dk_even_TR * sin_TR
        dturns_TR = back_odd_TR * even_TR - back_even_TR * odd_TR
        back_even_TR += d_own_T1 * c_even_HR
        back_odd_TR += d_own_T1 * c_odd_HR
        db_even_TR += back_even_TR
        db_odd_TR += back_odd_TR
        tl.store(db_bias_ptr + 2 * r, tl.sum(back_even_TR, 0), mask=r < R)
        tl.store(db_bias_ptr + 2 * r + 1, tl.sum(back_odd_TR, 0), mask=r < R)

        back_even_TR = dq_even_TR * cos_TR + dq_odd_TR * sin_TR
        back_odd_TR = dq_odd_TR * cos_TR - dq_even_TR * sin_TR
        dturns_TR += back_odd_TR * c_even_HR - back_even_TR * c_odd_HR
        back_even_TR += d_own_T1 * even_TR
        back_odd_TR += d_own_T1 * odd_TR
        dc_even_TR += back_even_TR
        dc_odd_TR += back_odd_TR
        tl.store(dc_bias_ptr + 2 * r, tl.sum(back_even_TR, 0), mask=r < R)
        tl.store(dc_bias_ptr + 2 * r + 1, tl.sum(back_odd_TR, 0), mask=r < R)

        dturns_TR *= TWO_PI
        tl.store(dstarts_ptr + of_start + r, tl.sum(dturns_TR, 0), mask=r < R)
        dturns_TR = tl.cumsum(dturns_TR, 0, reverse=True)
        dturn_TR += dturns_TR * dt_T[:, None]
        tl.store(ddt_ptr + entry * (T * H) + t * H + h, tl.sum(dturns_TR * turn_TR, 1), mask=t < T)
        if N > 2 * R:
            b_TS = b_rest_TS + tl.load(b_bias_ptr + rest, mask=rest < N, other=0.0)[None, :]
            c_TS = c_rest_TS + tl.load(c_bias_ptr + rest, mask=rest < N, other=0.0)[None, :]
            back_TS = load_masked(d_k_ptr + of_head, t + 1, rest, H * N, T, N) + d_own_T1 * c_TS
            db_rest_TS += back_TS
            tl.store(db_bias_ptr + rest, tl.sum(back_TS, 0), mask=rest < N)
            back_TS = load_masked(d_q_ptr + of_head, t, rest, H * N, T, N) + d_own_T1 * b_TS
            dc_rest_TS += back_TS
            tl.store(dc_bias_ptr + rest, tl.sum(back_TS, 0), mask=rest < N)
    store_masked(db_ptr + entry * (T * N), t, pair, N, T, 2 * R, joined(db_even_TR, db_odd_TR, TOKENS, RP))
    store_masked(dc_ptr + entry * (T * N), t, pair, N, T, 2 * R, joined(dc_even_TR, dc_odd_TR, TOKENS, RP))
    store_masked(dturn_ptr + entry * (T * R), t, r, R, T, R, dturn_TR)
    if N > 2 * R:
        store_masked(db_ptr + entry * (T * N), t, rest, N, T, N, db_rest_TS)
        store_masked(dc_ptr + entry * (T * N), t, rest, N, T, N, dc_rest_TS)
