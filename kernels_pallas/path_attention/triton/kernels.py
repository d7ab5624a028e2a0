"""Triton kernels of PaTH attention within chunks of tokens.

    kernel     one program per             writes
    solve      batch entry, chunk, head    x
    forward    batch entry, chunk, head    start, end, product, own, lse
    scores     batch entry, chunk, head    dq, dv, ds, dn, parts of dgates and dbeta
    matrices   batch entry, chunk, head    dbeta, a part of dw
    keys       batch entry, chunk, head    dk, dw

    operand                 shape             dtype    meaning
    q, k, v, w, do, d*      [B, T, H, K or V] input    tokens; w, dw fp32
    x                       [B, T, H, C]      low      row t: the row of X at position t
    beta, dbeta             [B, c, H, C]      fp32     step sizes (0 after T)
    gates, dgates           [c, B, H, C]      fp32     summed log forget gates (GATES)
    start, dstart           [c, B, H, C, K]   fp32     queries at the start of their chunk
    end, dend; dwalk        [c, B, H, C, .]   input    keys at the end of their chunk; values' gradient from the walk
    product; dproduct       [c, B, H, K, K]   low; fp32     P
    own; lse                [c, B, H, C, V]; [c, B, H, C]   fp32   softmax over the chunk's own keys
    total, D                [c, B, H, C]      fp32     logsumexp over all keys to base 2; do . o
    ds; dn                  [c, B, H, C, C]   input; low   gradients of s and N, transposed
    of_dn                   [c, B, H, C]      fp32     power of two of dn, one per query

The score of query i and key j is q_i^T H_i ... H_{j+1} k_j with H_s = I - beta_s w_s w_s^T, and I - P is the product of
a chunk's H (`path_attention/reference.py`). `path_walk`'s kernels, for earlier chunks, run between forward and scores;
they give the other part of dgates. With Q = SCALE q, X = (I + stril(beta W W^T))^{-1}, L = stril(W K^T), T = X
diag(beta) and N = tril(Q W^T):

    G = N T,   U = T^T W,   start = Q - G W,   end = K - L^T U,   P = W^T T W,   s = Q K^T - G L

    dG = -(ds L^T + dstart W^T),   dN = tril(dG T^T),   dU = -L dend + W dP^T,   R = T dU
    dL = -stril(G^T ds + U dend^T),   dA = -stril((N X)^T dN + (X^T W) R^T)
    dq = dstart + ds K + dN W,   dk = dend + ds^T Q + dL^T W
    dw = dN^T Q + dL K - G^T dstart + U dP + R + (E + E^T) W,   E = diag(beta) dA
    dbeta = diag((N X)^T dG) + diag((X^T W) dU^T) + diag(dA W W^T)

The backward pass is three kernels because the registers do not hold the accumulators of all gradients. A `t` after a
name marks a transposed tile, with the later position as column. dq and parts of dw are computed as [K, C]. Products of
q, k, v, do and softmax weights use the input dtype. The others use `low`: fp16 for 16-bit inputs, as in `path_walk`, or
three TF32 products for fp32 inputs, as in `solve`. |w| = 1, |X| <= 2 and |P| <= 2 fit fp16. All other operands have
powers of two: one per query or key where the sum runs over other axes, else one per chunk.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import LOG2_E, load_rows, load_tile, place_of, powers_of_two, store_rows, store_tile
from kernels_pallas.triton.triangular import SOLVE, product, store_row, third_and_fourth_rows, unit_inverses

ROOM = tl.constexpr(32.0)  # |X| <= 2: sums over 64 keys and 64 entries stay below 65504


@triton.jit
def solve_kernel(
    w_ptr, beta_ptr, x_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Compute X = (I + A)^{-1} with A = stril(beta W W^T) for one chunk of one head.

    Method: `triton/triangular.py`, in blocks of SOLVE rows. W is read SOLVE columns at a time, since all of it exceeds
    the registers of a warp.
    """
    b, h, start, head = place_of(tl.program_id(0), T, H, C)
    i = tl.arange(0, SOLVE)
    in_w, in_beta, out = w_ptr + b * T * H * K + h * K, beta_ptr + head * C, x_ptr + (b * T * H + h) * C
    later, earlier, row = i[:, None], i[None, :], start + i
    a00_RR = tl.zeros([SOLVE, SOLVE], tl.float32)
    a10_RR, a11_RR, a20_RR, a21_RR, a22_RR = a00_RR, a00_RR, a00_RR, a00_RR, a00_RR
    a30_RR, a31_RR, a32_RR, a33_RR = a00_RR, a00_RR, a00_RR, a00_RR
    for first in tl.range(0, KP, SOLVE):
        at_K = first + i
        w0_RK = load_tile(in_w, row, at_K, H * K, 1, T, K, BOUNDED, K != KP)
        a00_RR += product(w0_RK, tl.trans(w0_RK))
        if C > SOLVE:
            w1_RK = load_tile(in_w, row + SOLVE, at_K, H * K, 1, T, K, BOUNDED, K != KP)
            a10_RR += product(w1_RK, tl.trans(w0_RK))
            a11_RR += product(w1_RK, tl.trans(w1_RK))
        if C > 2 * SOLVE:
            w2_RK = load_tile(in_w, row + 2 * SOLVE, at_K, H * K, 1, T, K, BOUNDED, K != KP)
            a20_RR += product(w2_RK, tl.trans(w0_RK))
            a21_RR += product(w2_RK, tl.trans(w1_RK))
            a22_RR += product(w2_RK, tl.trans(w2_RK))
            w3_RK = load_tile(in_w, row + 3 * SOLVE, at_K, H * K, 1, T, K, BOUNDED, K != KP)
            a30_RR += product(w3_RK, tl.trans(w0_RK))
            a31_RR += product(w3_RK, tl.trans(w1_RK))
            a32_RR += product(w3_RK, tl.trans(w2_RK))
            a33_RR += product(w3_RK, tl.trans(w3_RK))
    a00_RR = tl.where(later > earlier, tl.load(in_beta + i)[:, None] * a00_RR, 0.0)
    if C > SOLVE:
        beta1_R1 = tl.load(in_beta + SOLVE + i)[:, None]
        a10_RR *= beta1_R1
        a11_RR = tl.where(later > earlier, beta1_R1 * a11_RR, 0.0)
    if C > 2 * SOLVE:
        beta2_R1, beta3_R1 = tl.load(in_beta + 2 * SOLVE + i)[:, None], tl.load(in_beta + 3 * SOLVE + i)[:, None]
        a20_RR *= beta2_R1
        a21_RR *= beta2_R1
        a22_RR = tl.where(later > earlier, beta2_R1 * a22_RR, 0.0)
        a30_RR *= beta3_R1
        a31_RR *= beta3_R1
        a32_RR *= beta3_R1
        a33_RR = tl.where(later > earlier, beta3_R1 * a33_RR, 0.0)
    x00_RR, x11_RR, x22_RR, x33_RR = unit_inverses(a00_RR, a11_RR, a22_RR, a33_RR, C // SOLVE)
    store_row(out, row, H * C, T, C, 0, x00_RR, x00_RR, x00_RR, x00_RR)
    if C > SOLVE:
        x10_RR = -product(x11_RR, product(a10_RR, x00_RR))
        store_row(out, row, H * C, T, C, 1, x10_RR, x11_RR, x11_RR, x11_RR)
    if C > 2 * SOLVE:
        x20_RR, x21_RR, x30_RR, x31_RR, x32_RR = third_and_fourth_rows(
            x00_RR, x10_RR, x11_RR, x22_RR, x33_RR, a20_RR, a21_RR, a30_RR, a31_RR, a32_RR
        )
        store_row(out, row, H * C, T, C, 2, x20_RR, x21_RR, x22_RR, x22_RR)
        store_row(out, row, H * C, T, C, 3, x30_RR, x31_RR, x32_RR, x33_RR)


@triton.jit
def _scaled(
    ptr, row, scale, H: tl.constexpr, T: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BOUNDED: tl.constexpr, low
):
    """Return rows [C, K] times `scale` in fp32, the rows scaled to below 2 in `low`, and their powers of two."""
    wide_CK = load_rows(ptr, row, H * K, T, K, KP, BOUNDED).to(tl.float32) * scale
    power_C, inverse_C = powers_of_two(wide_CK)
    return wide_CK, (wide_CK * inverse_C[:, None]).to(low), power_C, inverse_C


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, x_ptr, beta_ptr, gates_ptr, start_ptr, end_ptr, product_ptr, own_ptr, lse_ptr,
    B: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, BOUNDED: tl.constexpr, GATES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute what the walk needs, and the softmax over the chunk's own keys."""
    b, h, first, place = place_of(tl.program_id(0), T, H, C)
    chunk = ((first // C) * B + b) * H + h
    i, at_K = tl.arange(0, C), tl.arange(0, KP)
    row, later, earlier = first + i, i[:, None], i[None, :]
    tokens = b * T * H * K + h * K
    x_CC = load_rows(x_ptr + (b * T * H + h) * C, row, H * C, T, C, C, BOUNDED)
    low = x_CC.dtype
    w_CK = load_rows(w_ptr + tokens, row, H * K, T, K, KP, BOUNDED).to(low)
    wide_q_CK, low_q_CK, of_q_C, _ = _scaled(q_ptr + tokens, row, SCALE, H, T, K, KP, BOUNDED, low)
    beta_C = tl.load(beta_ptr + place * C + i)
    n_CC = tl.where(later >= earlier, tl.dot(low_q_CK, tl.trans(w_CK), input_precision=PRECISION), 0.0)
    g_CC = (tl.dot(n_CC.to(low), x_CC, input_precision=PRECISION) * beta_C[None, :]).to(low)
    start_CK = wide_q_CK - tl.dot(g_CC, w_CK, input_precision=PRECISION) * of_q_C[:, None]
    store_rows(start_ptr + chunk * C * K, i, K, C, start_CK, K, KP)
    wide_k_CK, low_k_CK, of_k_C, _ = _scaled(k_ptr + tokens, row, 1.0, H, T, K, KP, BOUNDED, low)
    l_CC = tl.dot(w_CK, tl.trans(low_k_CK), input_precision=PRECISION)
    l_CC = tl.where(later > earlier, l_CC, 0.0).to(low)
    s_CC = tl.dot(g_CC, l_CC, input_precision=PRECISION) * (of_q_C[:, None] * -of_k_C[None, :])
    v_CV = load_rows(v_ptr + b * T * H * V + h * V, row, H * V, T, V, VP, BOUNDED)
    dtype = v_CV.dtype
    s_CC = tl.dot(wide_q_CK.to(dtype), tl.trans(wide_k_CK.to(dtype)), s_CC, input_precision=PRECISION)
    if GATES:
        gates_C = tl.load(gates_ptr + chunk * C + i)
        s_CC += gates_C[:, None] - gates_C[None, :]
    s_CC = tl.where(later >= earlier, s_CC, float("-inf"))
    most_C = tl.max(s_CC, 1)
    p_CC = tl.exp2((s_CC - most_C[:, None]) * LOG2_E)
    sum_C = tl.sum(p_CC, 1)
    tl.store(lse_ptr + chunk * C + i, most_C + tl.log(sum_C))
    own_CV = tl.dot(p_CC.to(dtype), v_CV, input_precision=PRECISION) / sum_C[:, None]
    store_rows(own_ptr + chunk * C * V, i, V, C, own_CV, V, VP)

    u_CK = (beta_C[:, None] * tl.dot(tl.trans(x_CC), w_CK, input_precision=PRECISION)).to(low)
    end_CK = wide_k_CK - tl.dot(tl.trans(l_CC), u_CK, input_precision=PRECISION) * of_k_C[:, None]
    store_rows(end_ptr + chunk * C * K, i, K, C, end_CK, K, KP)
    product_KK = tl.dot(tl.trans(u_CK), w_CK, input_precision=PRECISION)
    store_rows(product_ptr + chunk * K * K, at_K, K, K, product_KK, K, KP)


@triton.jit
def scores_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, x_ptr, beta_ptr, gates_ptr, do_ptr, total_ptr, D_ptr, dstart_ptr, dwalk_ptr,
    dq_ptr, dv_ptr, ds_ptr, dn_ptr, of_dn_ptr, dbeta_ptr, dgates_ptr,
    B: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, BOUNDED: tl.constexpr, GATES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, dv, the gradients of s and N, transposed, and parts of dgates and dbeta."""
    b, h, first, place = place_of(tl.program_id(0), T, H, C)
    chunk = ((first // C) * B + b) * H + h
    i, at_K = tl.arange(0, C), tl.arange(0, KP)
    row, r, c = first + i, i[:, None], i[None, :]
    tokens, values = b * T * H * K + h * K, b * T * H * V + h * V
    x_CC = load_rows(x_ptr + (b * T * H + h) * C, row, H * C, T, C, C, BOUNDED)
    low = x_CC.dtype
    w_CK = load_rows(w_ptr + tokens, row, H * K, T, K, KP, BOUNDED).to(low)
    wide_q_CK, low_q_CK, of_q_C, _ = _scaled(q_ptr + tokens, row, SCALE, H, T, K, KP, BOUNDED, low)
    wide_k_CK, low_k_CK, of_k_C, _ = _scaled(k_ptr + tokens, row, 1.0, H, T, K, KP, BOUNDED, low)
    v_CV = load_rows(v_ptr + values, row, H * V, T, V, VP, BOUNDED)
    dtype = v_CV.dtype
    k_CK = wide_k_CK.to(dtype)
    beta_C = tl.load(beta_ptr + place * C + i)

    nt_CC = tl.where(r <= c, tl.dot(w_CK, tl.trans(low_q_CK), input_precision=PRECISION), 0.0)
    nxt_CC = tl.dot(tl.trans(x_CC), nt_CC.to(low), input_precision=PRECISION)
    l_CC = tl.dot(w_CK, tl.trans(low_k_CK), input_precision=PRECISION)
    l_CC = tl.where(r > c, l_CC, 0.0).to(low)
    st_CC = tl.dot(tl.trans(l_CC), (beta_C[:, None] * nxt_CC).to(low), input_precision=PRECISION)
    st_CC *= of_k_C[:, None] * -of_q_C[None, :]
    st_CC = tl.dot(k_CK, tl.trans(wide_q_CK.to(dtype)), st_CC, input_precision=PRECISION)
    if GATES:
        gates_C = tl.load(gates_ptr + chunk * C + i)
        st_CC += gates_C[None, :] - gates_C[:, None]
    total_C, D_C = tl.load(total_ptr + chunk * C + i), tl.load(D_ptr + chunk * C + i)
    st_CC = tl.exp2(tl.where(r <= c, st_CC * LOG2_E - total_C[None, :], float("-inf")))
    do_CV = load_rows(do_ptr + values, row, H * V, T, V, VP, BOUNDED)
    dv_CV = load_rows(dwalk_ptr + chunk * C * V, i, V, C, V, VP, False).to(tl.float32)
    dv_CV = tl.dot(st_CC.to(dtype), do_CV, dv_CV, input_precision=PRECISION)
    store_rows(dv_ptr + values, row, H * V, T, dv_CV, V, VP)
    dst_CC = st_CC * (tl.dot(v_CV, tl.trans(do_CV), input_precision=PRECISION) - D_C[None, :])
    if GATES:
        tl.store(dgates_ptr + chunk * C + i, tl.sum(dst_CC, 0) - tl.sum(dst_CC, 1))
    dst_low_CC = dst_CC.to(dtype)
    store_rows(ds_ptr + chunk * C * C, i, C, C, dst_low_CC, C, C)

    # The gradients of a query have one power of two. ROOM is for the sums over keys and over entries.
    dstart_CK = load_rows(dstart_ptr + chunk * C * K, i, K, C, K, KP, False)
    dst_CC *= of_k_C[:, None]
    most_C = tl.maximum(tl.max(tl.abs(dst_CC), 0), tl.max(tl.abs(dstart_CK), 1))
    power_C, inverse_C = powers_of_two(most_C[:, None])
    power_C, inverse_C = power_C * ROOM, inverse_C / ROOM
    dgt_CC = tl.dot(l_CC, (dst_CC * inverse_C[None, :]).to(low), input_precision=PRECISION)
    low_dstart_CK = (dstart_CK * inverse_C[:, None]).to(low)
    dgt_CC = -tl.dot(w_CK, tl.trans(low_dstart_CK), dgt_CC, input_precision=PRECISION)
    tl.store(dbeta_ptr + place * C + i, tl.sum(nxt_CC * (dgt_CC * (of_q_C * power_C)[None, :]), 1))
    dnt_CC = tl.dot(x_CC, (beta_C[:, None] * dgt_CC).to(low), input_precision=PRECISION)
    dnt_CC = tl.where(r <= c, dnt_CC, 0.0).to(low)
    store_rows(dn_ptr + chunk * C * C, i, C, C, dnt_CC, C, C)
    tl.store(of_dn_ptr + chunk * C + i, power_C)
    dq_KC = tl.dot(tl.trans(w_CK), dnt_CC, input_precision=PRECISION) * power_C[None, :]
    dq_KC += load_tile(dstart_ptr + chunk * C * K, at_K, i, 1, K, K, C, K != KP, False)
    dq_KC = tl.dot(tl.trans(k_CK), dst_low_CC, dq_KC, input_precision=PRECISION) * SCALE
    store_tile(dq_ptr + tokens, at_K, row, 1, H * K, K, T, dq_KC)


@triton.jit
def matrices_kernel(
    q_ptr, k_ptr, w_ptr, x_ptr, beta_ptr, dn_ptr, of_dn_ptr, dend_ptr, dproduct_ptr, part_ptr, dw_ptr, dbeta_ptr,
    B: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, BOUNDED: tl.constexpr, GATES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dbeta and, except for the terms with G and dL, dw; `part` is the part of dbeta from `scores_kernel`."""
    b, h, first, place = place_of(tl.program_id(0), T, H, C)
    chunk = ((first // C) * B + b) * H + h
    i, at_K = tl.arange(0, C), tl.arange(0, KP)
    row, r, c = first + i, i[:, None], i[None, :]
    tokens = b * T * H * K + h * K
    x_CC = load_rows(x_ptr + (b * T * H + h) * C, row, H * C, T, C, C, BOUNDED)
    low = x_CC.dtype
    w_CK = load_rows(w_ptr + tokens, row, H * K, T, K, KP, BOUNDED).to(low)
    _, low_k_CK, of_k_C, _ = _scaled(k_ptr + tokens, row, 1.0, H, T, K, KP, BOUNDED, low)
    _, low_q_CK, of_q_C, _ = _scaled(q_ptr + tokens, row, SCALE, H, T, K, KP, BOUNDED, low)
    beta_C = tl.load(beta_ptr + place * C + i)
    # All gradients have the power of two `power_1`, since most sums run over tokens.
    dproduct_KK = load_rows(dproduct_ptr + chunk * K * K, at_K, K, K, K, KP, K != KP)
    dend_CK = load_rows(dend_ptr + chunk * C * K, i, K, C, K, KP, False).to(tl.float32) * of_k_C[:, None]
    of_dn_C = tl.load(of_dn_ptr + chunk * C + i) * of_q_C
    most_C = tl.maximum(tl.max(tl.abs(dend_CK), 1), of_dn_C)
    most_1 = tl.maximum(tl.max(most_C, 0), tl.max(tl.max(tl.abs(dproduct_KK), 1), 0))
    power_1, inverse_1 = powers_of_two(tl.full([1, 1], 1.0, tl.float32) * most_1)

    l_CC = tl.dot(w_CK, tl.trans(low_k_CK), input_precision=PRECISION)
    l_CC = tl.where(r > c, -l_CC, 0.0).to(low)
    du_CK = tl.dot(l_CC, (dend_CK * inverse_1[:, None]).to(low), input_precision=PRECISION)
    low_dproduct_KK = (dproduct_KK * inverse_1[:, None]).to(low)
    du_CK = tl.dot(w_CK, tl.trans(low_dproduct_KK), du_CK, input_precision=PRECISION)
    xw_CK = tl.dot(tl.trans(x_CC), w_CK, input_precision=PRECISION)
    dbeta_C = tl.load(part_ptr + place * C + i) + tl.sum(xw_CK * (du_CK * power_1[:, None]), 1)
    dw_CK = tl.dot(x_CC, (beta_C[:, None] * du_CK).to(low), input_precision=PRECISION)
    of_row_C, inverse_C = powers_of_two(dw_CK)
    low_dr_CK = (dw_CK * inverse_C[:, None]).to(low)
    dat_CC = tl.dot(low_dr_CK, tl.trans(xw_CK.to(low)), input_precision=PRECISION) * of_row_C[:, None]
    dw_CK = tl.dot((beta_C[:, None] * xw_CK).to(low), low_dproduct_KK, dw_CK, input_precision=PRECISION)

    n_CC = tl.where(r >= c, tl.dot(low_q_CK, tl.trans(w_CK), input_precision=PRECISION), 0.0)
    nx_CC = tl.dot(n_CC.to(low), x_CC, input_precision=PRECISION).to(low)
    dnt_CC = load_rows(dn_ptr + chunk * C * C, i, C, C, C, C, False).to(tl.float32)
    dnt_CC = (dnt_CC * (of_dn_C * inverse_1)[None, :]).to(low)
    dat_CC = tl.dot(dnt_CC, nx_CC, dat_CC, input_precision=PRECISION)
    dw_CK = tl.dot(dnt_CC, low_q_CK, dw_CK, input_precision=PRECISION)
    dat_CC = tl.where(r < c, -dat_CC, 0.0)
    similar_CC = tl.dot(w_CK, tl.trans(w_CK), input_precision=PRECISION)
    tl.store(dbeta_ptr + place * C + i, dbeta_C + tl.sum(dat_CC * (similar_CC * power_1[:, None]), 0))
    dat_CC *= beta_C[None, :]
    dat_CC += tl.trans(dat_CC)
    of_row_C, inverse_C = powers_of_two(dat_CC)
    of_w_CK = tl.dot((dat_CC * inverse_C[:, None]).to(low), w_CK, input_precision=PRECISION) * of_row_C[:, None]
    dw_CK = (dw_CK + of_w_CK) * power_1[:, None]
    store_rows(dw_ptr + tokens, row, H * K, T, dw_CK, K, KP)


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, w_ptr, x_ptr, beta_ptr, ds_ptr, dstart_ptr, dend_ptr, part_ptr, dk_ptr, dw_ptr,
    B: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, BOUNDED: tl.constexpr, GATES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk, and dw from its part that `matrices_kernel` returns."""
    b, h, first, place = place_of(tl.program_id(0), T, H, C)
    chunk = ((first // C) * B + b) * H + h
    i, at_K = tl.arange(0, C), tl.arange(0, KP)
    row, r, c = first + i, i[:, None], i[None, :]
    tokens = b * T * H * K + h * K
    x_CC = load_rows(x_ptr + (b * T * H + h) * C, row, H * C, T, C, C, BOUNDED)
    low = x_CC.dtype
    w_CK = load_rows(w_ptr + tokens, row, H * K, T, K, KP, BOUNDED).to(low)
    wide_q_CK, low_q_CK, of_q_C, _ = _scaled(q_ptr + tokens, row, SCALE, H, T, K, KP, BOUNDED, low)
    _, low_k_CK, of_k_C, _ = _scaled(k_ptr + tokens, row, 1.0, H, T, K, KP, BOUNDED, low)
    beta_C = tl.load(beta_ptr + place * C + i)
    n_CC = tl.where(r >= c, tl.dot(low_q_CK, tl.trans(w_CK), input_precision=PRECISION), 0.0)
    nx_CC = tl.dot(n_CC.to(low), x_CC, input_precision=PRECISION).to(low)
    xw_CK = tl.dot(tl.trans(x_CC), w_CK, input_precision=PRECISION).to(low)
    dst_CC = load_rows(ds_ptr + chunk * C * C, i, C, C, C, C, False)
    wide_dst_CC = dst_CC.to(tl.float32) * of_q_C[None, :]
    dend_CK = load_rows(dend_ptr + chunk * C * K, i, K, C, K, KP, False).to(tl.float32)
    most_C = tl.maximum(tl.max(tl.abs(wide_dst_CC), 1), tl.max(tl.abs(dend_CK), 1))
    of_row_C, inverse_C = powers_of_two(most_C[:, None])
    dlt_CC = tl.dot((wide_dst_CC * inverse_C[:, None]).to(low), nx_CC, input_precision=PRECISION)
    dlt_CC = tl.dot((dend_CK * inverse_C[:, None]).to(low), tl.trans(xw_CK), dlt_CC, input_precision=PRECISION)
    dlt_CC = tl.where(r < c, -dlt_CC * beta_C[None, :], 0.0)
    dk_CK = dend_CK + tl.dot(dlt_CC.to(low), w_CK, input_precision=PRECISION) * of_row_C[:, None]
    dk_CK = tl.dot(dst_CC, wide_q_CK.to(dst_CC.dtype), dk_CK, input_precision=PRECISION)
    store_rows(dk_ptr + tokens, row, H * K, T, dk_CK, K, KP)

    # dw sums over tokens: one power of two for all.
    dstart_CK = load_rows(dstart_ptr + chunk * C * K, i, K, C, K, KP, False) * of_q_C[:, None]
    of_row_C *= of_k_C
    most_1 = tl.max(tl.maximum(tl.max(tl.abs(dstart_CK), 1), of_row_C), 0)
    power_1, inverse_1 = powers_of_two(tl.full([1, 1], 1.0, tl.float32) * most_1)
    low_dstart_CK = (dstart_CK * -inverse_1[:, None]).to(low)
    dw_KC = tl.dot(tl.trans(low_dstart_CK), nx_CC, input_precision=PRECISION) * beta_C[None, :]
    low_dlt_CC = (dlt_CC * (of_row_C * inverse_1)[:, None]).to(low)
    dw_KC = tl.dot(tl.trans(low_k_CK), low_dlt_CC, dw_KC, input_precision=PRECISION) * power_1[:, None]
    dw_KC += load_tile(part_ptr + tokens, at_K, row, 1, H * K, K, T, K != KP, BOUNDED)
    store_tile(dw_ptr + tokens, at_K, row, 1, H * K, K, T, dw_KC)
