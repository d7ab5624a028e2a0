"""Triton kernels of attention to selected chunks, backward.

A remote pass covers the selected chunks; a local pass covers the local chunk and adds the remote results. The kernels
`documents_*` do the same for packed documents, as in attention_kernels.py.

    p = 2^(x - lse),  D = rowsum(do * o),  dp = do v^T,  ds = scale p (dp - D),  dq = ds k,  dk = ds^T q,  dv = p^T do

    kernel             one program per                               writes
    remote_bwd_kernel  segment of rows that selected the same chunk  remote dq per row, partial dk and dv
    local_bwd_kernel   chunk and key-value head                      dq, dk, dv: local plus all remote parts

    operand                shape                   dtype
    q, k, v, do            [B, T, H or G, .]       as in attention_kernels.py
    lse, D                 [B, T, H]               fp32, lse in base 2
    sel, order, first      [B, N, S], ...          as in attention_kernels.py
    ends                   [B, S, NC]              int32, number of segments up to each chunk's last
    remote dq              [PIECES, B, N, H, K]    fp32 with one chunk per query, else q's dtype
    remote dk, remote dv   [B, S, SEGMENTS, C, .]  fp32, summed over the EACH heads of a selection
    dq                     [PIECES, B, T, H, K]    q's dtype if PIECES = 1, else fp32
    dk, dv                 [B, T, G, .]            as k and v

Rows are as in attention_kernels.py. A row needs only its query's lse and D, and a query's dq is the sum over its rows.
A popular chunk has many segments, so no program runs long. A chunk too large for one program is cut into PIECES of
BLOCK_N keys; each piece has programs in both passes, and there is one dq array per piece. There are no atomics: partial
results are added in row order, so two runs give the same bits.
"""

import triton
import triton.language as tl

from kernels_pallas.top1_chunk.triton.attention_kernels import at_stride, row_of, starts
from kernels_pallas.triton.sort_plan_kernels import block_of
from kernels_pallas.triton.tile_io import load_rows, store_rows


@triton.jit
def _row_grads(
    q_MK, do_MV, lse_M, D_M, k_NK, v_NV, is_seen_NM, dk_NK, dv_NV,
    SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (dq [M, K], dk, dv), with this tile's part added to dk and dv.

    Scores are [keys, rows]. As left operands of dk and dv they stay in registers; only the product for dq transposes
    them.
    """
    x_NM = tl.dot(k_NK, tl.trans(q_MK), input_precision=PRECISION) * LOG2_SCALE
    p_NM = tl.where(is_seen_NM, tl.exp2(x_NM - lse_M[None, :]), 0.0)
    dv_NV = tl.dot(p_NM.to(do_MV.dtype), do_MV, dv_NV, input_precision=PRECISION)
    dp_NM = tl.dot(v_NV, tl.trans(do_MV), input_precision=PRECISION)
    ds_NM = (SCALE * p_NM * (dp_NM - D_M[None, :])).to(q_MK.dtype)
    dk_NK = tl.dot(ds_NM, q_MK, dk_NK, input_precision=PRECISION)
    dq_MK = tl.dot(tl.trans(ds_NM), k_NK, input_precision=PRECISION)
    return dq_MK, dk_NK, dv_NV


@triton.jit
def _remote_bwd(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, order_ptr, first_ptr, ends_ptr, start_ptr, dq_ptr, dk_ptr, dv_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    EACH: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = T * TOP_K
    S: tl.constexpr = H // EACH
    pid, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    bs, segment = pid // SEGMENTS, pid % SEGMENTS
    # dq has a leading axis of pieces; the number of programs gives the number of batch entries and heads
    dq_ptr += piece.to(tl.int64) * (tl.num_programs(0) // (SEGMENTS * PIECES)) * EACH * N * K
    b, s = (bs // S).to(tl.int64), bs % S
    g = s // (S // G)
    chunk, nth = block_of(ends_ptr + bs * NC, segment, NC, NCP)
    if chunk < NC:
        begin = tl.load(first_ptr + bs * (NC + 1) + chunk) + nth * SEGMENT
        end = tl.minimum(begin + SEGMENT, tl.load(first_ptr + bs * (NC + 1) + chunk + 1))
        n = piece * BLOCK_N + tl.arange(0, BLOCK_N)
        key_N = chunk * C + n
        k_NK = load_rows(k_ptr + b * T * G * K + g * K, key_N, G * K, chunk * C + C, K, KP, C != PIECES * BLOCK_N)
        v_NV = load_rows(v_ptr + b * T * G * V + g * V, key_N, G * V, chunk * C + C, V, VP, C != PIECES * BLOCK_N)
        dk_NK = tl.zeros([BLOCK_N, KP], tl.float32)
        dv_NV = tl.zeros([BLOCK_N, VP], tl.float32)
        for i in tl.range(0, EACH):
            h = s * EACH + i
            for start in tl.range(begin, end, BLOCK_M):
                place_M = start + tl.arange(0, BLOCK_M)
                part_M = tl.load(order_ptr + bs.to(tl.int64) * N + place_M, mask=place_M < end, other=N)
                row_M = part_M // TOP_K
                q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
                do_MV = load_rows(do_ptr + b * T * H * V + h * V, row_M, H * V, T, V, VP, True)
                # with documents, empty rows have p = exp2(x - inf) = 0 instead of a mask: fewer registers
                no_row: tl.constexpr = float("inf") if DOCUMENTS else 0.0
                lse_M = tl.load(lse_ptr + (b * T + row_M) * H + h, mask=row_M < T, other=no_row)
                D_M = tl.load(D_ptr + (b * T + row_M) * H + h, mask=row_M < T, other=0.0)
                if DOCUMENTS:  # all rows are in the document of the chunk's last token
                    is_seen_NM = ((n < C) & (key_N >= tl.load(start_ptr + b * T + chunk * C + C - 1)))[:, None]
                else:
                    is_seen_NM = (row_M < T)[None, :] & (n < C)[:, None]
                dq_MK, dk_NK, dv_NV = _row_grads(
                    q_MK, do_MV, lse_M, D_M, k_NK, v_NV, is_seen_NM, dk_NK, dv_NV, SCALE, LOG2_SCALE, PRECISION
                )  # fmt: skip
                store_rows(dq_ptr + b * N * H * K + h * K, at_stride(part_M, N * H * K), H * K, N, dq_MK, K, KP)
        part = (bs.to(tl.int64) * SEGMENTS + segment) * C
        store_rows(dk_ptr + part * K, n, K, C, dk_NK, K, KP)
        store_rows(dv_ptr + part * V, n, V, C, dv_NV, V, VP)


@triton.jit
def remote_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, order_ptr, first_ptr, ends_ptr, dq_ptr, dk_ptr, dv_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    EACH: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq of the N = T TOP_K rows that have a chunk, and dk, dv of each segment.

    Shapes: dq [PIECES, B, N, H, K]; dk, dv [B, S, SEGMENTS, C, .] fp32, only segments that exist.
    """
    _remote_bwd(
        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, order_ptr, first_ptr, ends_ptr, order_ptr, dq_ptr, dk_ptr, dv_ptr,
        T, H, G, K, V, KP, VP, C, TOP_K, BLOCK_N, PIECES, EACH, NC, NCP, SEGMENTS, SEGMENT, BLOCK_M, SCALE, LOG2_SCALE,
        False, PRECISION,
    )  # fmt: skip


@triton.jit
def documents_remote_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, order_ptr, first_ptr, ends_ptr, start_ptr, dq_ptr, dk_ptr, dv_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    EACH: tl.constexpr, NC: tl.constexpr, NCP: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq, dk and dv as `remote_bwd_kernel`, for packed documents."""
    _remote_bwd(
        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, order_ptr, first_ptr, ends_ptr, start_ptr, dq_ptr, dk_ptr, dv_ptr,
        T, H, G, K, V, KP, VP, C, TOP_K, BLOCK_N, PIECES, EACH, NC, NCP, SEGMENTS, SEGMENT, BLOCK_M, SCALE, LOG2_SCALE,
        True, PRECISION,
    )  # fmt: skip


@triton.jit
def _local_bwd(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, sel_ptr, ends_ptr, remote_dq_ptr, remote_dk_ptr, remote_dv_ptr,
    start_ptr, dq_ptr, dk_ptr, dv_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr, ALL_SELECT: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, NC: tl.constexpr, SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = T * TOP_K
    n_chunks: tl.constexpr = (T + C - 1) // C
    R: tl.constexpr = H // G
    S: tl.constexpr = H // EACH
    pid, piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    n_entries = tl.num_programs(0) // (n_chunks * G * PIECES)
    dq_ptr += piece.to(tl.int64) * n_entries * T * H * K
    remote_dq_ptr += piece.to(tl.int64) * n_entries * N * H * K
    b, g, chunk = (pid // n_chunks // G).to(tl.int64), pid // n_chunks % G, pid % n_chunks
    stop = tl.minimum(chunk * C + C, T)
    n = piece * BLOCK_N + tl.arange(0, BLOCK_N)
    key_N = tl.where(n < C, chunk * C + n, T)
    k_NK = load_rows(k_ptr + b * T * G * K + g * K, key_N, G * K, T, K, KP, True)
    v_NV = load_rows(v_ptr + b * T * G * V + g * V, key_N, G * V, T, V, VP, True)
    dk_NK = tl.zeros([BLOCK_N, KP], tl.float32)
    dv_NV = tl.zeros([BLOCK_N, VP], tl.float32)
    for r in range(R):
        h = g * R + r
        bs = b * S + h // EACH
        if (chunk < NC) & (r % EACH == 0):  # no query selects the last chunk
            begin = 0
            if chunk > 0:
                begin = tl.load(ends_ptr + bs * NC + chunk - 1)
            for segment in tl.range(begin, tl.load(ends_ptr + bs * NC + chunk)):
                part = (bs * SEGMENTS + segment) * C
                dk_NK += load_rows(remote_dk_ptr + part * K, n, K, C, K, KP, True).to(tl.float32)
                dv_NV += load_rows(remote_dv_ptr + part * V, n, V, C, V, VP, True).to(tl.float32)
        for start in tl.range(chunk * C, stop, BLOCK_M):
            row_M = start + tl.arange(0, BLOCK_M)
            row_M = tl.where(row_M < stop, row_M, T)
            q_MK = load_rows(q_ptr + b * T * H * K + h * K, row_M, H * K, T, K, KP, True)
            do_MV = load_rows(do_ptr + b * T * H * V + h * V, row_M, H * V, T, V, VP, True)
            lse_M = tl.load(lse_ptr + (b * T + row_M) * H + h, mask=row_M < T, other=0.0)
            D_M = tl.load(D_ptr + (b * T + row_M) * H + h, mask=row_M < T, other=0.0)
            is_seen_NM = (key_N[:, None] <= row_M[None, :]) & (row_M < T)[None, :] & (n < C)[:, None]
            if DOCUMENTS:
                is_seen_NM &= key_N[:, None] >= starts(start_ptr + b * T, row_M, T, True)[None, :]
            dq_MK, dk_NK, dv_NV = _row_grads(
                q_MK, do_MV, lse_M, D_M, k_NK, v_NV, is_seen_NM, dk_NK, dv_NV, SCALE, LOG2_SCALE, PRECISION
            )  # fmt: skip
            if chunk > 0:
                if ALL_SELECT:
                    rows_ptr = remote_dq_ptr + b * T * H * K + h * K
                    dq_MK += load_rows(rows_ptr, row_M, H * K, T, K, KP, True).to(tl.float32)
                else:
                    # with zeros first, the loop has no change of layout; the order of sums is kept where EACH is 1
                    sum_MK = tl.zeros([BLOCK_M, KP], tl.float32) if EACH > 1 else dq_MK
                    for j in tl.range(0, TOP_K, loop_unroll_factor=AT_ONCE):
                        part_M = row_of(sel_ptr + b * N * S + h // EACH, row_M, j, T, S, TOP_K)
                        rows_ptr = remote_dq_ptr + b * N * H * K + h * K
                        part_MK = load_rows(rows_ptr, at_stride(part_M, N * H * K), H * K, N, K, KP, True)
                        sum_MK += part_MK.to(tl.float32)
                    dq_MK = dq_MK + sum_MK if EACH > 1 else sum_MK
            store_rows(dq_ptr + b * T * H * K + h * K, row_M, H * K, T, dq_MK, K, KP)
    store_rows(dk_ptr + b * T * G * K + g * K, key_N, G * K, T, dk_NK, K, KP)
    store_rows(dv_ptr + b * T * G * V + g * V, key_N, G * V, T, dv_NV, V, VP)


@triton.jit
def local_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, sel_ptr, ends_ptr, remote_dq_ptr, remote_dk_ptr, remote_dv_ptr,
    dq_ptr, dk_ptr, dv_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr, ALL_SELECT: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, NC: tl.constexpr, SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq [PIECES, B, T, H, K], and dk, dv in their final layout.

    There is one program per batch entry, key-value head, chunk and piece.
    """
    _local_bwd(
        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, sel_ptr, ends_ptr, remote_dq_ptr, remote_dk_ptr, remote_dv_ptr,
        sel_ptr, dq_ptr, dk_ptr, dv_ptr,
        T, H, G, K, V, KP, VP, C, TOP_K, EACH, ALL_SELECT, AT_ONCE, BLOCK_N, PIECES, NC, SEGMENTS, BLOCK_M, SCALE,
        LOG2_SCALE, False, PRECISION,
    )  # fmt: skip


@triton.jit
def documents_local_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, sel_ptr, ends_ptr, remote_dq_ptr, remote_dk_ptr, remote_dv_ptr,
    start_ptr, dq_ptr, dk_ptr, dv_ptr,
    T: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr, PIECES: tl.constexpr, NC: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr,
    SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq, dk and dv as `local_bwd_kernel`, for packed documents."""
    _local_bwd(
        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, D_ptr, sel_ptr, ends_ptr, remote_dq_ptr, remote_dk_ptr, remote_dv_ptr,
        start_ptr, dq_ptr, dk_ptr, dv_ptr,
        T, H, G, K, V, KP, VP, C, TOP_K, EACH, False, AT_ONCE, BLOCK_N, PIECES, NC, SEGMENTS, BLOCK_M, SCALE,
        LOG2_SCALE, True, PRECISION,
    )  # fmt: skip
