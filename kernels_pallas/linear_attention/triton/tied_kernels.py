"""Triton kernels for linear attention with a low-rank part whose b is k, as in KDA.

    kernel    one program per batch entry, head and     writes
    weights   chunk                                     r~, a~ and k^; with SCORES also g, a|k and N = r|k
    pass      time segment, BLOCK columns of S          S, Z and O; with REVERSE L and dY

    Z = V + U = X (V + a~ S),   O = r~ S + N Z,   S <- diag(e^{g_C}) S + k^^T Z,       X = (I - a|k)^{-1}
    dY = X^T (N^T dO + k^ L) = dV,                L <- diag(e^{g_C}) L + r~^T dO + a~^T dY

    operand         shape             dtype   meaning
    r_in, a_in      [B, T, H, K]      input   readers times their decay from the chunk start, r~ and a~
    k_out           [B, T, H, K]      input   writers times their decay to the chunk end, k^
    pairs           [B, T, H, C]      fp32    a|k, which `solve` inverts (low_rank_kernels.py)
    inverse, n      [B, T, H, C]      input   X and N; n has the diagonal
    z               [B, T, H, V]      input   Z; in REVERSE dY

Z replaces both V and U, so the state is read by one product and written by one. `weights` reads the decays once and
leaves operands that `pass` multiplies without any exponential. `pass` therefore waits for three products per chunk, and
O costs two products more instead of another kernel that reads the states. Other operands and flags: kernels.py.
"""

import triton
import triton.language as tl

from kernels_pallas.linear_attention import interface
from kernels_pallas.linear_attention.triton.weight_kernels import (
    BOUND,
    from_middle,
    from_start,
    halvings_of,
    in_same_block,
    load_sums,
)
from kernels_pallas.triton.tile_io import LOG2_E, load_rows, load_tile, place_of, store_rows, store_tile

FLOOR = tl.constexpr(interface.FLOOR)


@triton.jit
def weights_kernel(
    r_ptr, a_ptr, k_ptr, decays_ptr, g_ptr, r_in_ptr, a_in_ptr, k_out_ptr, pairs_ptr, n_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
    SCORES: tl.constexpr, MILD: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the weighted operands of a chunk and head; with SCORES also g and both scores.

    `decays` are log w with SCORES, otherwise g. Log decays below FLOOR count as FLOOR.
    The scores are computed as in `weight_kernels.scores`, with the writers' weights shared. Readers below -BOUND take a
    separate branch: in one path with the others, they cost 1,100 bytes of spills.
    """
    n_blocks: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = K % KEYS != 0
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i = tl.arange(0, C)
    row = start + i
    in_K = b * T * H * K + h * K
    r_ptr += in_K
    a_ptr += in_K
    k_ptr += in_K
    in_g = head // H * (C * H * K) + h * K
    dtype = r_ptr.dtype.element_ty
    if SCORES:
        g_ptr += in_g
        log_w_CK = load_rows(decays_ptr + in_K, row, H * K, T, K, KP, BOUNDED)
        log_w_CK = tl.where(log_w_CK < FLOOR, FLOOR, log_w_CK)  # keeps NaN, unlike a maximum
        store_rows(g_ptr, i, H * K, C, tl.cumsum(log_w_CK * LOG2_E, 0), K, KP)
        tl.debug_barrier()  # other threads read these sums, in other layouts and one position later
    else:
        g_ptr = decays_ptr + in_g
    m_CC, n_CC, own_C = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    lowest = 0.0
    for block in tl.range(0, n_blocks, num_stages=STAGES):
        at_K = block * KEYS + tl.arange(0, KEYS)
        r_CK = load_tile(r_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART)
        k_CK = load_tile(k_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART)
        g_CK = load_sums(g_ptr, i[:, None], at_K[None, :], H * K, K, False)
        end_K = tl.load(g_ptr + (C - 1) * H * K + at_K, mask=at_K < K, other=0.0)
        store_tile(k_out_ptr + in_K, row, at_K, H * K, 1, T, K, k_CK * tl.exp2(end_K[None, :] - g_CK))
        if SCORES:
            own_C += tl.sum(r_CK.to(tl.float32) * k_CK.to(tl.float32), 1)
            k_KC = load_tile(k_ptr, at_K, row, 1, H * K, K, T, PART, BOUNDED)
            g_KC = load_sums(g_ptr, i[None, :], at_K[:, None], H * K, K, False)
            right_KC = (k_KC * from_start(g_KC, False, not MILD)).to(dtype)
            lowest = tl.minimum(lowest, tl.min(tl.min(g_KC, 1), 0))
        r_CK = (r_CK * tl.exp2(g_CK)).to(dtype)
        store_tile(r_in_ptr + in_K, row, at_K, H * K, 1, T, K, r_CK)
        if SCORES:
            left_CK = r_CK if MILD else tl.where(g_CK >= -BOUND, r_CK, 0.0).to(dtype)
            n_CC = tl.dot(left_CK, right_KC, n_CC, input_precision=PRECISION)
        a_CK = load_tile(a_ptr, row, at_K, H * K, 1, T, K, BOUNDED, PART)
        g_CK = load_sums(g_ptr, i[:, None], at_K[None, :], H * K, K, True)
        a_CK = (a_CK * tl.exp2(g_CK)).to(dtype)
        store_tile(a_in_ptr + in_K, row, at_K, H * K, 1, T, K, a_CK)
        if SCORES:
            left_CK = a_CK if MILD else tl.where(g_CK >= -BOUND, a_CK, 0.0).to(dtype)
            m_CC = tl.dot(left_CK, right_KC, m_CC, input_precision=PRECISION)
    if SCORES:
        if (lowest < -BOUND) & (not MILD):
            n_CC = with_far(n_CC, r_ptr, k_ptr, g_ptr, start, T, H, K, KEYS, C, False, BOUNDED, PRECISION)
            m_CC = with_far(m_CC, a_ptr, k_ptr, g_ptr, start, T, H, K, KEYS, C, True, BOUNDED, PRECISION)
        # Entries above the diagonal, which may be infinite, are masked once, after all sums.
        is_own_CC, is_pair_CC = i[:, None] == i[None, :], i[:, None] > i[None, :]
        m_CC, n_CC = tl.where(is_pair_CC, m_CC, 0.0), tl.where(is_pair_CC, n_CC, 0.0)
        n_CC = tl.where(is_own_CC, own_C[:, None], n_CC)
        store_tile(pairs_ptr + (b * T * H + h) * C, row, i, H * C, 1, T, C, m_CC)
        store_tile(n_ptr + (b * T * H + h) * C, row, i, H * C, 1, T, C, n_CC)


@triton.jit
def with_far(
    a_CC, x_ptr, y_ptr, g_ptr, start,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr, BEFORE: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores `a_CC` of readers x and writers y, with the readers below -BOUND added."""
    n_blocks: tl.constexpr = (K + KEYS - 1) // KEYS
    PART: tl.constexpr = K % KEYS != 0
    i = tl.arange(0, C)
    for block in range(n_blocks):
        at_K = block * KEYS + tl.arange(0, KEYS)
        x_CK = load_tile(x_ptr, start + i, at_K, H * K, 1, T, K, BOUNDED, PART)
        y_KC = load_tile(y_ptr, at_K, start + i, 1, H * K, K, T, PART, BOUNDED)
        x_sums_CK = load_sums(g_ptr, i[:, None], at_K[None, :], H * K, K, BEFORE)
        y_sums_KC = load_sums(g_ptr, i[None, :], at_K[:, None], H * K, K, False)
        halvings = halvings_of(x_sums_CK, C)
        half = halvings * 0 + C // 2
        for _ in range(halvings):
            by_CK = from_middle(g_ptr, x_sums_CK, i[:, None], at_K[None, :], half, H * K, K, True)
            by_KC = from_middle(g_ptr, y_sums_KC, i[None, :], at_K[:, None], half, H * K, K, False)
            left_CK, right_KC = (x_CK * by_CK).to(x_CK.dtype), (y_KC * by_KC).to(x_CK.dtype)
            product_CC = tl.dot(left_CK, right_KC, input_precision=PRECISION)
            a_CC += tl.where(in_same_block(i[:, None], i[None, :], half), product_CC, 0.0)
            half = half >> 1
    return a_CC


@triton.jit
def pass_kernel(
    r_in_ptr, a_in_ptr, k_out_ptr, v_ptr, inverse_ptr, n_ptr, g_ptr, start_ptr, states_ptr, z_ptr, o_ptr, last_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr, ENDS: tl.constexpr, REVERSE: tl.constexpr, SUMS: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass BLOCK columns of a head's state through SEGMENT chunks, and compute Z and O.

    In REVERSE v is dO, the state is L, and the kernel computes dY from the last chunk back. `states` are the states
    before each chunk is added. ENDS writes only `last`, from S = 0, followed by K columns that start from the identity
    (see state_scan/triton/segments.py). g has SUMS positions per chunk, C or only the last.
    """
    n_chunks: tl.constexpr = (T + C - 1) // C
    n_segments: tl.constexpr = (n_chunks + SEGMENT - 1) // SEGMENT
    COLUMNS: tl.constexpr = V + K if ENDS else V
    n_blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    PART: tl.constexpr = V % BLOCK != 0 or COLUMNS != V
    pid = tl.program_id(0)
    block, h, bs = pid % n_blocks, pid // n_blocks % H, pid // (n_blocks * H)
    b, first, n_steps = (bs // n_segments).to(tl.int64), bs % n_segments * SEGMENT, SEGMENT
    if n_chunks % SEGMENT != 0:
        n_steps = tl.minimum(SEGMENT, n_chunks - first)
    i, at_K, at_V = tl.arange(0, C), tl.arange(0, KP), block * BLOCK + tl.arange(0, BLOCK)
    in_K, in_V, in_C = b * T * H * K + h * K, b * T * H * V + h * V, (b * T * H + h) * C
    dtype = v_ptr.dtype.element_ty
    state = bs.to(tl.int64) * H + h
    if ENDS:
        s_KV = tl.where(at_V[None, :] - V == at_K[:, None], 1.0, 0.0)
    else:
        s_KV = load_tile(start_ptr + state * (K * V), at_K, at_V, V, 1, K, V, K != KP, PART)
    for step in tl.range(0, n_steps, num_stages=STAGES):
        chunk = first + (n_steps - 1 - step if REVERSE else step)
        head, row = (b * n_chunks + chunk) * H + h, chunk * C + i
        v_CV = load_tile(v_ptr + in_V, row, at_V, H * V, 1, T, V, BOUNDED, PART)
        in_g = ((b * n_chunks + chunk + 1) * SUMS - 1) * (H * K) + h * K
        end_K = tl.load(g_ptr + in_g + at_K, mask=at_K < K, other=0.0)
        low_KV = s_KV.to(dtype)
        if not ENDS:
            store_tile(states_ptr + head * (K * V), at_K, at_V, V, 1, K, V, low_KV)
        s_KV *= tl.exp2(end_K)[:, None]
        if REVERSE:
            inverse_CC = load_tile(inverse_ptr + in_C, i, row, 1, H * C, C, T, False, BOUNDED)
            n_CC = load_tile(n_ptr + in_C, i, row, 1, H * C, C, T, False, BOUNDED)
            k_CK = load_rows(k_out_ptr + in_K, row, H * K, T, K, KP, BOUNDED)
            r_KC = load_tile(r_in_ptr + in_K, at_K, row, 1, H * K, K, T, K != KP, BOUNDED)
            a_KC = load_tile(a_in_ptr + in_K, at_K, row, 1, H * K, K, T, K != KP, BOUNDED)
            y_CV = tl.dot(n_CC, v_CV, input_precision=PRECISION)
            y_CV = tl.dot(k_CK, low_KV, y_CV, input_precision=PRECISION)
            z_CV = tl.dot(inverse_CC, y_CV.to(dtype), input_precision=PRECISION).to(dtype)
            s_KV = tl.dot(r_KC, v_CV, s_KV, input_precision=PRECISION)
            s_KV = tl.dot(a_KC, z_CV, s_KV, input_precision=PRECISION)
        else:
            inverse_CC = load_rows(inverse_ptr + in_C, row, H * C, T, C, C, BOUNDED)
            a_CK = load_rows(a_in_ptr + in_K, row, H * K, T, K, KP, BOUNDED)
            k_KC = load_tile(k_out_ptr + in_K, at_K, row, 1, H * K, K, T, K != KP, BOUNDED)
            y_CV = tl.dot(a_CK, low_KV, v_CV.to(tl.float32), input_precision=PRECISION)
            z_CV = tl.dot(inverse_CC, y_CV.to(dtype), input_precision=PRECISION).to(dtype)
            s_KV = tl.dot(k_KC, z_CV, s_KV, input_precision=PRECISION)
            if not ENDS:
                n_CC = load_rows(n_ptr + in_C, row, H * C, T, C, C, BOUNDED)
                r_CK = load_rows(r_in_ptr + in_K, row, H * K, T, K, KP, BOUNDED)
                o_CV = tl.dot(r_CK, low_KV, input_precision=PRECISION)
                o_CV = tl.dot(n_CC, z_CV, o_CV, input_precision=PRECISION)
                store_tile(o_ptr + in_V, row, at_V, H * V, 1, T, V, o_CV)
        if not ENDS:
            store_tile(z_ptr + in_V, row, at_V, H * V, 1, T, V, z_CV)
    store_tile(last_ptr + state * (K * COLUMNS), at_K, at_V, COLUMNS, 1, K, COLUMNS, s_KV)
