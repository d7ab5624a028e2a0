"""Triton kernels of the chunk-start states: one launch covers all chunks.

    kernel        one program per                   recurrence
    products      head, BLOCK_V columns of S        S <- d S + P S + R
    elementwise   batch entry, BLOCK state entries  S <- d * S + R

    operand           products             elementwise       meaning (all fp32)
    decay             [c, M, K or 1]       [B, c, MIDDLE]    d
    p                 [c, M, K, K]                           P; M = B H
    r, update         [c, M, K, V]         [B, c, SIZE]      R
    s, last           [M, K, V]            [B, SIZE]         first and last state
    states            [c, M, K, V]         [B, c, SIZE]      states before each chunk; in REVERSE after it

The state stays in registers. Decays, updates and P of the next chunks are loaded before the state needs them
(num_stages or AHEAD), so a step costs one product instead of the memory latency. Sums have a fixed order: two runs give
equal bits. Source: `state_scan/api.py`.
"""

import triton
import triton.language as tl


@triton.jit
def products_kernel(
    decay_ptr, p_ptr, r_ptr, s_ptr, states_ptr, last_ptr,
    CHUNKS: tl.constexpr, M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, DECAYS: tl.constexpr,
    BLOCK_V: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scan S <- d S + P S + R for one of M = B H heads and BLOCK_V columns.

    `decay` has DECAYS entries per head: K or one. REVERSE goes back over the chunks with P^T.
    """
    n_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    m = (pid // n_blocks).to(tl.int64)
    k_K = tl.arange(0, KP)
    v_V = pid % n_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    at_KV = k_K[:, None] * V + v_V[None, :]
    at_KK = k_K[:, None] * K + k_K[None, :]
    is_K = k_K < K
    is_KV = is_K[:, None] & (v_V < V)[None, :]
    is_KK = is_K[:, None] & is_K[None, :]
    s_KV = tl.load(s_ptr + m * (K * V) + at_KV, mask=is_KV, other=0.0)
    for i in tl.range(0, CHUNKS, num_stages=STAGES):
        chunk = (CHUNKS - 1 - i if REVERSE else i) * (tl.num_programs(0) // n_blocks).to(tl.int64) + m
        p_KK = tl.load(p_ptr + chunk * (K * K) + at_KK, mask=is_KK, other=0.0)
        r_KV = tl.load(r_ptr + chunk * (K * V) + at_KV, mask=is_KV, other=0.0)
        if DECAYS == 1:
            next_KV = tl.load(decay_ptr + chunk) * s_KV + r_KV
        else:
            next_KV = tl.load(decay_ptr + chunk * K + k_K, mask=is_K, other=0.0)[:, None] * s_KV + r_KV
        tl.store(states_ptr + chunk * (K * V) + at_KV, s_KV, mask=is_KV)
        s_KV = tl.dot(tl.trans(p_KK) if REVERSE else p_KK, s_KV, next_KV, input_precision=PRECISION)
    tl.store(last_ptr + m * (K * V) + at_KV, s_KV, mask=is_KV)


@triton.jit
def elementwise_kernel(
    decay_ptr, update_ptr, s_ptr, states_ptr, last_ptr,
    CHUNKS: tl.constexpr, SIZE: tl.constexpr, MIDDLE: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Scan S <- d * S + R for one batch entry and BLOCK of the SIZE state entries.

    Each of the MIDDLE decays covers INNER consecutive entries; the pattern repeats every MIDDLE * INNER entries. AHEAD
    chunks are loaded before the first of them is used.
    """
    n_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    b = (pid // n_blocks).to(tl.int64)
    at = pid % n_blocks * BLOCK + tl.arange(0, BLOCK)
    at_decay = at // INNER % MIDDLE
    is_in = at < SIZE
    s = tl.load(s_ptr + b * SIZE + at, mask=is_in, other=0.0)
    for first in tl.range(0, CHUNKS, AHEAD):
        decays = ()
        updates = ()
        for i in tl.static_range(AHEAD):
            is_here = is_in & (first + i < CHUNKS)
            chunk = b * CHUNKS + (CHUNKS - 1 - first - i if REVERSE else first + i)
            decays += (tl.load(decay_ptr + chunk * MIDDLE + at_decay, mask=is_here, other=1.0),)
            updates += (tl.load(update_ptr + chunk * SIZE + at, mask=is_here, other=0.0),)
        for i in tl.static_range(AHEAD):
            chunk = b * CHUNKS + (CHUNKS - 1 - first - i if REVERSE else first + i)
            tl.store(states_ptr + chunk * SIZE + at, s, mask=is_in & (first + i < CHUNKS))
            s = decays[i] * s + updates[i]
    tl.store(last_ptr + b * SIZE + at, s, mask=is_in)
