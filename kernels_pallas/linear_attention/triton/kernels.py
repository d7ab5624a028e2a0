"""Triton kernels of linear attention with a decay per channel; each serves the outputs and, in REVERSE, the gradients.

Equations in `linear_attention/api.py`. Readers r (and a) and writers k (and b) mirror each other: the gradient of the
values is what flows back from dO through the writers, as the outputs are what flows on from V through the readers, and
the gradient of the state is a state. So one kernel makes states and their gradients, and one o and dv:

    sums      g to base 2, or the gradient of log w from that of g
    pairs     a|b of every chunk                                     LOW_RANK alone, in low_rank_kernels.py
    solve     X = (I - a|b)^-1                                       likewise
    mix       X (a|k) V and X a~, of which U is made given S; in REVERSE those of dY         likewise
    state     S (and U) over all chunks, or those of a segment; in REVERSE L (and dY)
    out       O; in REVERSE dV
    d_scores  the gradients of r|k and, LOW_RANK, of a|k, r|b and a|b                       in keys_kernels.py
    keys      dr, dk, da and db, and what they give dg                                       likewise

A tile holds a whole chunk of C positions along one axis; keys are taken in blocks of KEYS, in `state` as a whole,
padded to KP, and values in blocks of BLOCK. MILD means that no g is below -BOUND (weight_kernels.py). Sums are float32,
products of the inputs' dtype. g is [B, c C, H, K] float32, to base 2, constant behind T; rows behind T of every other
array read as zeros. TIED, as in KDA, b is k: see low_rank_kernels.py. No tile that is computed is transposed for a
product (compilers got that wrong on Hopper). No atomics: two runs give the same bits.
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
    """The sums g [B, c C, H, K] of log2 w from log w [B, T, H, K]; in REVERSE those of x from a chunk's end, back."""
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
    TIED: tl.constexpr, REVERSE: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S <- e^{g_C} S + K^^T V + B^^T U over SEGMENT chunks, of one batch entry and head, for BLOCK columns of S.

    x is k, y is v, and with LOW_RANK low is b and z is U [B, T, H, V], which this makes of what `mix` has made; TIED z
    is V + U, and all that is added. In REVERSE L <- e^{g_C} L + R~^T dO + A~^T dY from the last chunk on: x is r, y is
    do, low is a, z is dY. states [B, c, H, K, V] are those before a chunk is added; start and last float32
    [B, s, H, K, V], of the s segments of time. ENDS writes last alone, made of zero in place of start, and with
    LOW_RANK in K more columns of the identity.
    """
    n_chunks: tl.constexpr = (T + C - 1) // C
    n_segments: tl.constexpr = (n_chunks + SEGMENT - 1) // SEGMENT
    COLUMNS: tl.constexpr = V + K if ENDS and LOW_RANK else V
    n_blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    PART: tl.constexpr = V % BLOCK != 0 or COLUMNS != V
    BEFORE: tl.constexpr = REVERSE and BONUS
    HAS_Y: tl.constexpr = REVERSE or not TIED
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
        if HAS_Y:
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
        if HAS_Y:
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
    """O = (r|k) V + (r|b) U + R~ S of one chunk of a head: x is r, y is k, z is v, states those before the chunks.

    In REVERSE dV = (r|k)^T dO + (a|k)^T dY + K^ L: x is k, y is r, z is do, states the gradients behind the chunks.
    With LOW_RANK y_low and z_low are b and U, or a and dY.
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
