"""Triton kernels of the head norm and output gate: one pass per direction.

    operand                         shape           dtype    meaning
    x, gate, skip, y                [B, T, H, V]    input    recurrence output, gate, skip operand a, result
    factor, dfactor                 [B, T, H]       fp32     factors s of the skip operand, and their gradient
    gain, bias                      [B, H, V]       fp32     norm parameters, one copy per batch entry
    dy, dpassed, dx, dgate, dskip   [B, T, H, V]    input    gradients; dpassed is the residual gradient of x
    dgain, dbias                    [B, c, H, V]    fp32     parameter gradients, summed within each chunk of tokens

    y = (norm(x) + s a) act(g),   or with FIRST   y = norm((x + s a) act(g))

One program handles TOKENS x STEPS consecutive tokens and a group of HEADS heads, or all heads with FIRST, where one
norm spans all heads (gate first, then norm; TOKENS must be 1, because the norm reduces the whole tile). With BIAS the
norm is centred. A program loops over tiles of R = TOKENS x HEADS rows with V channels, padded to VP, and keeps the
gains of its heads in registers. Rows after the last token, and rows for heads that only pad the group, read as zero and
are not written. The backward pass computes the norm again, because it must read each row anyway. Equations and sources:
`head_norm/api.py`.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import load_rows, store_rows


@triton.jit
def place_of(pid, T: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """Return a program's batch entry, token chunk, index into [B, c] and first head."""
    n_chunks: tl.constexpr = (T + CHUNK - 1) // CHUNK
    n_groups: tl.constexpr = (H + HEADS - 1) // HEADS
    group, chunk, b = pid % n_groups, pid // n_groups % n_chunks, (pid // (n_groups * n_chunks)).to(tl.int64)
    return b, chunk, b * n_chunks + chunk, group * HEADS


@triton.jit
def parameter(ptr, head, H: tl.constexpr, V: tl.constexpr, VP: tl.constexpr):
    """Return [R, VP]: the row of [H, V] for each `head`."""
    return load_rows(ptr, head, V, H, V, VP, True)


@triton.jit
def data(ptr, row, T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, VP: tl.constexpr):
    """Return [R, VP]: rows of [T, H, V] in float32."""
    return load_rows(ptr, row, V, T * H, V, VP, True).to(tl.float32)


@triton.jit
def mean(x_RV, N: tl.constexpr, FIRST: tl.constexpr):
    """Return the mean over N channels: of each row, or with FIRST of each token."""
    if FIRST:
        return tl.sum(tl.sum(x_RV, 1), 0) / N
    else:
        return tl.sum(x_RV, 1)[:, None] / N


@triton.jit
def normed(x_RV, is_channel_RV, EPS: tl.constexpr, CENTER: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr):
    """Return the norm before gain and bias, and its scale 1 / sqrt(mean x^2 + eps)."""
    if CENTER:
        x_RV = tl.where(is_channel_RV, x_RV - mean(x_RV, N, FIRST), 0.0)
    scale = tl.rsqrt(mean(x_RV * x_RV, N, FIRST) + EPS)
    return x_RV * scale, scale


@triton.jit
def through_norm(du_RV, unit_RV, scale, CENTER: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr):
    """Return the gradient of `normed`'s operand; `du_RV` must be 0 in the padding."""
    across_RV = du_RV - unit_RV * mean(du_RV * unit_RV, N, FIRST)
    if CENTER:
        across_RV -= mean(du_RV, N, FIRST)
    return across_RV * scale


@triton.jit
def activated(g_RV, ACTIVATION: tl.constexpr):
    """Return the gate's activation and its derivative."""
    if ACTIVATION == "none":
        return g_RV, tl.full(g_RV.shape, 1.0, tl.float32)
    s_RV = tl.sigmoid(g_RV)
    if ACTIVATION == "sigmoid":
        return s_RV, s_RV * (1.0 - s_RV)
    return g_RV * s_RV, s_RV * (1.0 + g_RV * (1.0 - s_RV))


@triton.jit
def forward_kernel(
    x_ptr, gate_ptr, skip_ptr, factor_ptr, gain_ptr, bias_ptr, y_ptr,
    T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    STEPS: tl.constexpr, EPS: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr, SKIP: tl.constexpr,
    BIAS: tl.constexpr, FIRST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y for the program's tokens and heads."""
    N: tl.constexpr = H * V if FIRST else V
    b, chunk, _, first = place_of(tl.program_id(0), T, H, HEADS, TOKENS * STEPS)
    row = tl.arange(0, TOKENS * HEADS)
    head = first + row % HEADS
    gain_RV = parameter(gain_ptr + b * H * V, head, H, V, VP)
    bias_RV = parameter(bias_ptr + b * H * V, head, H, V, VP) if BIAS else gain_RV
    x_ptr += b * T * H * V
    gate_ptr += b * T * H * V
    skip_ptr += b * T * H * V
    y_ptr += b * T * H * V
    factor_ptr += b * T * H
    for step in tl.range(0, STEPS, num_stages=STAGES):
        token = (chunk * STEPS + step) * TOKENS + row // HEADS
        at = tl.where(head < H, token * H + head, T * H)
        is_channel_RV = (at < T * H)[:, None] & (tl.arange(0, VP) < V)[None, :]
        y_RV = data(x_ptr, at, T, H, V, VP)
        if SKIP:
            skip_RV = data(skip_ptr, at, T, H, V, VP)
            factor_R1 = tl.load(factor_ptr + at, mask=at < T * H, other=0.0)[:, None]
        if GATE:
            gate_RV = data(gate_ptr, at, T, H, V, VP)
        if not FIRST:
            y_RV = normed(y_RV, is_channel_RV, EPS, BIAS, N, FIRST)[0] * gain_RV
            if BIAS:
                y_RV += bias_RV
        if SKIP:
            y_RV += skip_RV * factor_R1
        if GATE:
            y_RV *= activated(gate_RV, ACTIVATION)[0]
        if FIRST:
            y_RV = normed(y_RV, is_channel_RV, EPS, BIAS, N, FIRST)[0] * gain_RV
            if BIAS:
                y_RV += bias_RV
        store_rows(y_ptr, at, V, T * H, y_RV, V, VP)


@triton.jit
def backward_kernel(
    x_ptr, gate_ptr, skip_ptr, factor_ptr, gain_ptr, bias_ptr, dy_ptr, dpassed_ptr,
    dx_ptr, dgate_ptr, dskip_ptr, dfactor_ptr, dgain_ptr, dbias_ptr,
    T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    STEPS: tl.constexpr, EPS: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr, SKIP: tl.constexpr,
    BIAS: tl.constexpr, FIRST: tl.constexpr, PASSED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute all operand gradients for the program's tokens and heads.

    PASSED adds `dpassed`, the residual gradient, to dx. dgain and dbias are sums over the program's tokens, [B, c, H,
    V].
    """
    N: tl.constexpr = H * V if FIRST else V
    b, chunk, place, first = place_of(tl.program_id(0), T, H, HEADS, TOKENS * STEPS)
    row = tl.arange(0, TOKENS * HEADS)
    head = first + row % HEADS
    gain_RV = parameter(gain_ptr + b * H * V, head, H, V, VP)
    bias_RV = parameter(bias_ptr + b * H * V, head, H, V, VP) if BIAS else gain_RV
    x_ptr += b * T * H * V
    gate_ptr += b * T * H * V
    skip_ptr += b * T * H * V
    factor_ptr += b * T * H
    dy_ptr += b * T * H * V
    dpassed_ptr += b * T * H * V
    dx_ptr += b * T * H * V
    dgate_ptr += b * T * H * V
    dskip_ptr += b * T * H * V
    dfactor_ptr += b * T * H
    dgain_RV = tl.zeros([TOKENS * HEADS, VP], tl.float32)
    dbias_RV = dgain_RV
    for step in tl.range(0, STEPS, num_stages=STAGES):
        token = (chunk * STEPS + step) * TOKENS + row // HEADS
        at = tl.where(head < H, token * H + head, T * H)
        is_channel_RV = (at < T * H)[:, None] & (tl.arange(0, VP) < V)[None, :]
        x_RV, dy_RV = data(x_ptr, at, T, H, V, VP), data(dy_ptr, at, T, H, V, VP)
        if SKIP:
            skip_RV = data(skip_ptr, at, T, H, V, VP)
            factor_R1 = tl.load(factor_ptr + at, mask=at < T * H, other=0.0)[:, None]
        if GATE:
            active_RV, slope_RV = activated(data(gate_ptr, at, T, H, V, VP), ACTIVATION)
        if PASSED:
            dpassed_RV = data(dpassed_ptr, at, T, H, V, VP)
        w_RV = x_RV  # operand of the gate
        if not FIRST:
            unit_RV, scale = normed(x_RV, is_channel_RV, EPS, BIAS, N, FIRST)
            w_RV = unit_RV * gain_RV
            if BIAS:
                w_RV += bias_RV
        if SKIP:
            w_RV += skip_RV * factor_R1
        dw_RV = dy_RV  # gradient: first for the gate's result, then for its operand
        if FIRST:
            z_RV = w_RV * active_RV if GATE else w_RV
            unit_RV, scale = normed(z_RV, is_channel_RV, EPS, BIAS, N, FIRST)
            dw_RV = through_norm(dy_RV * gain_RV, unit_RV, scale, BIAS, N, FIRST)
        if GATE:
            store_rows(dgate_ptr, at, V, T * H, dw_RV * w_RV * slope_RV, V, VP)
            dw_RV *= active_RV
        if SKIP:
            store_rows(dskip_ptr, at, V, T * H, dw_RV * factor_R1, V, VP)
            tl.store(dfactor_ptr + at, tl.sum(dw_RV * skip_RV, 1), mask=at < T * H)
        dn_RV = dy_RV if FIRST else dw_RV
        dgain_RV += dn_RV * unit_RV
        if BIAS:
            dbias_RV += dn_RV
        dx_RV = dw_RV if FIRST else through_norm(dw_RV * gain_RV, unit_RV, scale, BIAS, N, FIRST)
        if PASSED:
            dx_RV += dpassed_RV
        store_rows(dx_ptr, at, V, T * H, dx_RV, V, VP)
    store_sums(dgain_ptr + place * H * V, first, dgain_RV, H, V, VP, HEADS, TOKENS)
    if BIAS:
        store_sums(dbias_ptr + place * H * V, first, dbias_RV, H, V, VP, HEADS, TOKENS)


@triton.jit
def store_sums(
    ptr, first, x_RV, H: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr
):
    """Write sums over a tile's tokens to the rows of its heads."""
    if TOKENS > 1:
        x_RV = tl.sum(tl.reshape(x_RV, [TOKENS, HEADS, VP]), 0)
    store_rows(ptr, first + tl.arange(0, HEADS), V, H, x_RV, V, VP)
