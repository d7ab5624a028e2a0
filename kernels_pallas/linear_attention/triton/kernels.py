"""Triton kernels of linear attention with a decay per key channel.

    kernel     one program per batch entry, head and     writes; with REVERSE
    sums       chunk                                     g from log w; gradient of log w from dg
    pairs      chunk                (LOW_RANK)           a|b                                    low_rank_kernels.py
    solve      chunk                (LOW_RANK)           X = (I - a|b)^-1                       low_rank_kernels.py
    mix        chunk                (LOW_RANK)           X (a|k) V and X a~; the parts of dY    low_rank_kernels.py
    state      time segment, BLOCK columns of S          S and U; L and dY
    out        chunk                                     O; dV
    d_scores   chunk                                     gradients of the scores                keys_kernels.py
    keys       chunk, KEYS keys                          dr, dk, da, db, dg, du                 keys_kernels.py
    weights    chunk                (TIED)               g, r~, a~, k^; a|k, r|k                tied_kernels.py
    pass       time segment, BLOCK columns of S  (TIED)  S, V + U and O; L and dY               tied_kernels.py

    operand            shape              dtype    meaning
    r, a, k, b         [B, T, H, K]       input    readers r and a, writers k and b
    v, o, do, dv       [B, T, H, V]       input    values, outputs and their gradients
    z                  [B, T, H, V]       input    U; in REVERSE dY
    x_mixed, z_mixed   as r, v            input    results of `mix`
    g                  [B, c C, H, K]     fp32     sum of log2 w from the chunk start, constant after T
    u                  [B, H, K]          fp32     bonus (BONUS)
    states             [B, c, H, K, V]    input    S before each chunk; in REVERSE L after each chunk
    start, last        [B, s, H, K, V]    fp32     states before and after each of s time segments

    forward  (state)  x, y, low, z = k, v, b, U        (out)  x, y, z, y_low, z_low = r, k, v, b, U
    REVERSE  (state)  x, y, low, z = r, do, a, dY      (out)  x, y, z, y_low, z_low = k, r, do, a, dY

Readers and writers mirror each other: V reaches O through the readers, and dO reaches dV through the writers. One
kernel therefore computes each result and, in REVERSE, its gradient. A tile holds all C positions of a chunk on one
axis, values in blocks of BLOCK, and keys in blocks of KEYS (`state`: all keys, padded to KP). MILD means that no g is
below -BOUND (weight_kernels.py). TIED means that b is k, as in KDA: `weights` and `pass` then take the place of
`sums`, `pairs`, `mix`, `state` and `out`, and `keys` sums dg itself. Sums are float32, products
use the input dtype, and rows after T read as zero. No computed tile is transposed for a product, because compilers got
that wrong on Hopper. No atomics are used: two runs give equal bits. Equations and sources: `linear_attention/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.linear_attention.triton.weight_kernels import load_sums, scores, with_diagonal
from kernels_pallas.triton.tile_io import LOG2_E, load_rows, load_tile, place_of, store_rows, store_tile


@triton.jit
def sums_kernel(
    x_ptr, sums_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Compute g [B, c C, H, K], the sums of log2 w, from log w [B, T, H, K].

    In REVERSE, compute the sums of x from the end of each chunk back, [B, T, H, K].
    """
    PADDED: tl.constexpr = (T + C - 1) // C * C
    ROWS_IN: tl.constexpr = PADDED if REVERSE else T
    ROWS_OUT: tl.constexpr = T if REVERSE else PADDED
    b, h, start, _ = place_of(tl.program_id(0), T, H, C)
    row = start + tl.arange(0, C)
    x_CK = load_rows(x_ptr + b * ROWS_IN * H * K + h * K, row, H * K, ROWS_IN, K, KP, T != PADDED)
    sums_CK = tl.cumsum(x_CK if REVERSE else x_CK * LOG2_E, 0, reverse=REVERSE)
    store_rows(sums_ptr + b * ROWS_OUT * H * K + h * K, row, H * K, ROWS_OUT, sums_CK, K, KP)


@triton.jit
def state_kernel(
    x_ptr, y_ptr, low_ptr, z_mixed_ptr, x_mixed_ptr, g_ptr, start_ptr, states_ptr, z_ptr, last_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ENDS: tl.constexpr, BONUS: tl.constexpr, LOW_RANK: tl.constexpr,
    REVERSE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass BLOCK columns of a head's state through SEGMENT chunks.

    S <- e^{g_C} S + K^^T V + B^^T U. With LOW_RANK the kernel also computes U from the results of `mix`. In REVERSE,
    L <- e^{g_C} L + R~^T dO + A~^T dY from the last chunk back. `states` are the states before each chunk is added.
    ENDS writes only `last`, from S = 0, and with LOW_RANK also K columns that start from the identity (see
    state_scan/triton/segments.py).
    """
    n_chunks: tl.constexpr = (T + C - 1) // C
    n_segments: tl.constexpr = (n_chunks + SEGMENT - 1) // SEGMENT
    COLUMNS: tl.constexpr = V + K if ENDS and LOW_RANK else V
    n_blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    PART: tl.constexpr = V % BLOCK != 0 or COLUMNS != V
    BEFORE: tl.constexpr = REVERSE and BONUS
    pid = tl.program_id(0)
    block, h, bs = pid % n_blocks, pid // n_blocks % H, pid // (n_blocks * H)
    b, first, n_steps = (bs // n_segments).to(tl.int64), bs % n_segments * SEGMENT, SEGMENT
    if n_chunks % SEGMENT != 0:
        n_steps = tl.minimum(SEGMENT, n_chunks - first)
    i, at_K, at_V = tl.arange(0, C), tl.arange(0, KP), block * BLOCK + tl.arange(0, BLOCK)
    dtype = y_ptr.dtype.element_ty
    state = bs.to(tl.int64) * H + h
    if ENDS:
        s_KV = tl.where(at_V[None, :] - V == at_K[:, None], 1.0, 0.0)
    else:
        s_KV = load_tile(start_ptr + state * (K * V), at_K, at_V, V, 1, K, V, K != KP, PART)
    for step in tl.range(0, n_steps, num_stages=STAGES):
        chunk = first + (n_steps - 1 - step if REVERSE else step)
        head, row = (b * n_chunks + chunk) * H + h, chunk * C + i
        in_g = g_ptr + (b * n_chunks + chunk) * (C * H * K) + h * K
        x_KC = load_tile(x_ptr + b * T * H * K + h * K, at_K, row, 1, H * K, K, T, K != KP, BOUNDED)
        y_CV = load_tile(y_ptr + b * T * H * V + h * V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        sums_KC = load_sums(in_g, i[None, :], at_K[:, None], H * K, K, BEFORE)
        end_K = tl.load(in_g + (C - 1) * H * K + at_K, mask=at_K < K, other=0.0)
        if not ENDS:
            store_tile(states_ptr + head * (K * V), at_K, at_V, V, 1, K, V, s_KV)
        by_KC = tl.exp2(sums_KC if REVERSE else end_K[:, None] - sums_KC)
        if LOW_RANK:
            x_mixed_CK = load_rows(x_mixed_ptr + b * T * H * K + h * K, row, H * K, T, K, KP, BOUNDED)
            z_CV = load_tile(z_mixed_ptr + b * T * H * V + h * V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
            z_CV = tl.dot(x_mixed_CK, s_KV.to(dtype), z_CV.to(tl.float32), input_precision=PRECISION).to(dtype)
            if not ENDS:
                store_tile(z_ptr + b * T * H * V + h * V, row, at_V, H * V, 1, T, V, z_CV)
        s_KV *= tl.exp2(end_K)[:, None]
        s_KV = tl.dot((x_KC * by_KC).to(dtype), y_CV, s_KV, input_precision=PRECISION)
        if LOW_RANK:
            low_KC = load_tile(low_ptr + b * T * H * K + h * K, at_K, row, 1, H * K, K, T, K != KP, BOUNDED)
            if REVERSE:
                by_KC = tl.exp2(load_sums(in_g, i[None, :], at_K[:, None], H * K, K, True))
            s_KV = tl.dot((low_KC * by_KC).to(dtype), z_CV, s_KV, input_precision=PRECISION)
    store_tile(last_ptr + state * (K * COLUMNS), at_K, at_V, COLUMNS, 1, K, COLUMNS, s_KV)


@triton.jit
def out_kernel(
    x_ptr, y_ptr, z_ptr, y_low_ptr, z_low_ptr, u_ptr, g_ptr, states_ptr, out_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, BONUS: tl.constexpr, LOW_RANK: tl.constexpr, REVERSE: tl.constexpr, MILD: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute O = (r|k) V + (r|b) U + R~ S for a chunk and head.

    In REVERSE, dV = (r|k)^T dO + (a|k)^T dY + K^ L. y_low and z_low are read only with LOW_RANK.
    """
    n_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    n_keys: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = V % BLOCK != 0
    PART_K: tl.constexpr = K % KEYS != 0
    BEFORE: tl.constexpr = BONUS and not REVERSE
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i = tl.arange(0, C)
    row = start + i
    in_K, in_V = b * T * H * K + h * K, b * T * H * V + h * V
    in_g = g_ptr + head // H * (C * H * K) + h * K
    dtype = x_ptr.dtype.element_ty
    a_CC = scores(
        x_ptr + in_K, y_ptr + in_K, in_g, start, T, H, K, KEYS, C, not REVERSE, BEFORE, BONUS and REVERSE, MILD,
        BOUNDED, PRECISION,
    )  # fmt: skip
    at_u = u_ptr + (b * H + h) * K
    a_CC = with_diagonal(a_CC, x_ptr + in_K, y_ptr + in_K, at_u, start, T, H, K, KEYS, C, BONUS, BOUNDED).to(dtype)
    low_CC = a_CC
    if LOW_RANK:
        low_CC = scores(
            x_ptr + in_K, y_low_ptr + in_K, in_g, start, T, H, K, KEYS, C, not REVERSE, False, REVERSE, MILD,
            BOUNDED, PRECISION,
        )  # fmt: skip
        if not REVERSE:
            low_CC = with_diagonal(
                low_CC, x_ptr + in_K, y_low_ptr + in_K, at_u, start, T, H, K, KEYS, C, False, BOUNDED
            )
        low_CC = low_CC.to(dtype)
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_V = block * BLOCK + tl.arange(0, BLOCK)
        z_CV = load_tile(z_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        out_CV = tl.dot(a_CC, z_CV, input_precision=PRECISION)
        if LOW_RANK:
            z_low_CV = load_tile(z_low_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
            out_CV = tl.dot(low_CC, z_low_CV, out_CV, input_precision=PRECISION)
        for keys in tl.static_range(0, n_keys):
            at_K = keys * KEYS + tl.arange(0, KEYS)
            s_KV = load_tile(states_ptr + head * (K * V), at_K, at_V, V, 1, K, V, PART_K, PART)
            x_CK = load_tile(x_ptr + in_K, row, at_K, H * K, 1, T, K, BOUNDED, PART_K)
            sums_CK = load_sums(in_g, i[:, None], at_K[None, :], H * K, K, BEFORE)
            if REVERSE:
                sums_CK = tl.load(in_g + (C - 1) * H * K + at_K, mask=at_K < K, other=0.0)[None, :] - sums_CK
            out_CV = tl.dot((x_CK * tl.exp2(sums_CK)).to(dtype), s_KV, out_CV, input_precision=PRECISION)
        store_tile(out_ptr + in_V, row, at_V, H * V, 1, T, V, out_CV)
