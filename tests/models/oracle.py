"""Reference models in float64 numpy, token by token, from the published equations.

The module imports nothing from seqjax; it shares only settings and parameter names with the tested code. It loops over
positions like the definitions, so sizes are tiny. Sources: the papers and implementations listed in each mixer's file.
"""

import math
from typing import Any

import numpy as np

Tree = Any


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(0, x)


def relu_squared(x):
    return np.maximum(x, 0) ** 2


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(p, x):
    return x @ p["w"] + p.get("b", 0.0)


def rms_norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def layer_norm(x, gain, bias, eps):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain + bias


def head_norm(x_THV, p):
    y = layer_norm(x_THV, 1.0, 0.0, 64e-5)
    return y.reshape(len(y), -1) * p["g"] + p["b"]


def norm(config, p, x):
    if config.norm == "rmsnorm":
        return rms_norm(x, p["g"], config.norm_eps)
    return layer_norm(x, p["g"], p["b"], config.norm_eps)


def unit(x, eps=1e-6):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + eps)


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def heads_of(x_TE, n):
    return x_TE.reshape(len(x_TE), n, -1)


def scaled(frequency, m):
    """Return a pair's scaled frequency: linear, or Llama 3.1's, which depends on the wavelength in tokens."""
    if m.rope_scaling == "linear":
        return frequency / m.rope_factor
    wavelength = 2 * math.pi / frequency
    if wavelength < m.rope_original_len / m.rope_high_freq_factor:
        return frequency
    if wavelength > m.rope_original_len / m.rope_low_freq_factor:
        return frequency / m.rope_factor
    smooth = m.rope_original_len / wavelength - m.rope_low_freq_factor
    smooth /= m.rope_high_freq_factor - m.rope_low_freq_factor
    return (1 - smooth) * frequency / m.rope_factor + smooth * frequency


def rotate(x_THK, m):
    """Rotate the pairs (i, i + R/2) of the first R channels by position * base^(-2i / R).

    R is the settings' share of the channels; frequencies are scaled if the settings have some.
    """
    width = round(getattr(m, "rope_share", 1) * x_THK.shape[-1])
    if width < x_THK.shape[-1]:
        return np.concatenate([rotate_halves(x_THK[..., :width], m), x_THK[..., width:]], -1)
    return rotate_halves(x_THK, m)


def rotate_halves(x_THK, m):
    half = x_THK.shape[-1] // 2
    frequencies = [float(m.rope_base) ** (-i / half) for i in range(half)]
    if getattr(m, "rope_scaling", "none") != "none":
        frequencies = [scaled(frequency, m) for frequency in frequencies]
    angle = np.arange(len(x_THK))[:, None] * np.array(frequencies)
    z = (x_THK[..., :half] + 1j * x_THK[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1)


def slopes(n):
    """Return ALiBi's slopes, 2^(-8 t / n) for n a power of two.

    Otherwise use the slopes of the next lower power, then every second slope of the next higher power.
    """
    low = 2 ** math.floor(math.log2(n))
    first = [2 ** (-8 * t / low) for t in range(1, low + 1)]
    return np.array(first + [2 ** (-4 * t / low) for t in range(1, 2 * low, 2)][: n - low])


def causal_conv(p, x_TE):
    """Convolve each channel; the last tap multiplies the current token."""
    width = p["w"].shape[1]
    y = np.zeros_like(x_TE)
    for t in range(len(x_TE)):
        for tap in range(width):
            at = t - (width - 1) + tap
            y[t] += p["w"][:, tap] * x_TE[at] if at >= 0 else 0.0
    return y + p.get("b", 0.0)


def short_conv(p, x_TE):
    """Apply the convolution (none without parameters) and SiLU."""
    return silu(x_TE if p is None else causal_conv(p, x_TE))


def canon(p, x_TE):
    return x_TE + causal_conv(p, x_TE)


# ------------------------------------------------------------------------------------------------------- attention
def convolved(m, p, name, x_TE):
    """Return a projection, plus its convolution over time if the settings have one."""
    return canon(p["conv"][name], x_TE) if getattr(m, "conv", False) else x_TE


def queries_and_keys(m, p, x_q, x_k):
    """After projection or table, convolution, norm and rotation, one key head per query head."""
    inputs = {"q": x_q, "k": x_k}
    q, k = (p[n]["table"][: len(x)] if "table" in p[n] else linear(p[n], x) for n, x in inputs.items())
    q, k = convolved(m, p, "q", q), convolved(m, p, "k", k)
    q, k = heads_of(q, m.heads), heads_of(k, getattr(m, "kv_heads", None) or m.heads)
    if getattr(m, "temperature", None):
        q, k = unit(q), unit(k)
    elif getattr(m, "qk_norm", False):
        eps = m.norm_eps if getattr(m, "name", "") == "msa" else getattr(m, "qk_norm_eps", 1e-5)
        if m.qk_norm == "full":
            q, k = (
                rms_norm(x.reshape(len(x), -1), p[name]["g"], eps).reshape(x.shape)
                for name, x in (("q_norm", q), ("k_norm", k))
            )
        else:
            q, k = rms_norm(q, p["q_norm"]["g"], eps), rms_norm(k, p["k_norm"]["g"], eps)
    if m.position == "rope":
        q, k = rotate(q, m), rotate(k, m)
    return q, np.repeat(k, m.heads // k.shape[1], axis=1)


def softmax_weights(m, q, k):
    """Return causal weights [T, H, S]; a window includes the query's position."""
    n = len(q)
    temperature = getattr(m, "temperature", None)
    factor = math.sqrt(q.shape[-1]) / temperature if temperature else 1 / math.sqrt(q.shape[-1])
    s = factor * np.einsum("thk,shk->ths", q, k)
    ago = np.arange(n)[:, None] - np.arange(n)
    if m.position == "alibi":
        s = s - slopes(m.heads)[:, None] * ago[:, None]
    seen = (ago >= 0) & (ago < (getattr(m, "window", None) or n))
    return softmax(np.where(seen[:, None], s, -np.inf))


def entropy(weights_THS):
    """Return the entropy in nats, [T, H]."""
    return -(weights_THS * np.log(np.where(weights_THS > 0, weights_THS, 1.0))).sum(-1)


def softmax_attention(m, q, k, v):
    return np.einsum("ths,shv->thv", softmax_weights(m, q, k), v)


def top1_element(m, q, k, v):
    o = np.zeros((*q.shape[:2], v.shape[-1]))
    for t in range(len(q)):
        for h in range(q.shape[1]):
            o[t, h] = v[np.argmax(k[: t + 1, h] @ q[t, h]), h]
    return o


def top1_chunk(m, q, k, v):
    """Attend to the own chunk and the best past chunks per query and head.

    Chunks are ranked by attention mass, best key, or mean key (approx). A shortlist ranks by best key among the chunks
    with the best mean keys.
    """
    size, scale = m.chunk_size, 1 / math.sqrt(q.shape[-1])
    o = np.zeros((*q.shape[:2], v.shape[-1]))
    for t in range(len(q)):
        own = t // size
        for h in range(q.shape[1]):
            s = scale * k[:, h] @ q[t, h]
            at = list(range(own * size, t + 1))
            if own:
                past = [range(c * size, (c + 1) * size) for c in range(own)]
                means = [k[list(c), h].mean(0) @ q[t, h] for c in past]
                if m.selection == "exact":
                    score = [np.exp(s[list(c)]).sum() for c in past]
                elif m.selection == "approx":
                    score = means
                else:
                    score = [s[list(c)].max() for c in past]
                if m.selection == "shortlist":
                    listed = np.argsort(means)[::-1][: m.shortlist]
                    score = [x if c in listed else -np.inf for c, x in enumerate(score)]
                at = [*(j for c in np.argsort(score)[::-1][: m.top_k] for j in past[c]), *at]
            o[t, h] = softmax(s[at]) @ v[at, h]
    return o


CORES = {
    "transformer": softmax_attention,
    "transformer_pp": softmax_attention,
    "post_norm_attention": softmax_attention,
    "top1_element": top1_element,
    "top1_chunk": top1_chunk,
}


def attention(m, p, x):
    q, k = queries_and_keys(m, p, x, x)
    v = heads_of(convolved(m, p, "v", linear(p["v"], x)), m.kv_heads or m.heads)
    y = CORES[m.name](m, q, k, np.repeat(v, m.heads // v.shape[1], axis=1)).reshape(len(x), -1)
    return linear(p["out"], y * sigmoid(linear(p["gate"], x)) if m.gate else y)


# ---------------------------------------------------------------------------------------------------------------- MLA
def turned_neighbors(x_THR, base, positions_T=None):
    """Rotate the channel pairs (2i, 2i + 1) by position * base^(-2i / R)."""
    positions_T = np.arange(len(x_THR)) if positions_T is None else positions_T
    first, second = x_THR[..., ::2], x_THR[..., 1::2]
    angle = (positions_T[:, None] * base ** (-np.arange(first.shape[-1]) / first.shape[-1]))[:, None]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x_THR.shape)


def mla_operands(m, p, x):
    """Return queries, keys and values, [T, H, ...]."""
    own = m.head_dim or x.shape[1] // m.heads
    rank = m.kv_rank or x.shape[1] // 3
    queries = linear(p["q"], rms_norm(linear(p["q_in"], x), p["q_norm"]["g"], m.norm_eps) if m.q_rank else x)
    q, latent = heads_of(queries, m.heads), linear(p["kv_in"], x)
    kv = heads_of(linear(p["kv"], rms_norm(latent[:, :rank], p["kv_norm"]["g"], m.norm_eps)), m.heads)
    shared_q, shared_k = q[..., own:], latent[:, None, rank:]
    if m.position == "rope":
        shared_q, shared_k = (turned_neighbors(y, m.rope_base) for y in (shared_q, shared_k))
    k = np.concatenate([kv[..., :own], np.repeat(shared_k, m.heads, axis=1)], -1)
    return np.concatenate([q[..., :own], shared_q], -1), k, kv[..., own:]


def mla_weights(q, k):
    s = np.einsum("thk,shk->ths", q, k) / math.sqrt(q.shape[-1])
    return softmax(np.where(np.tri(len(q), dtype=bool)[:, None], s, -np.inf))


def mla(m, p, x):
    q, k, v = mla_operands(m, p, x)
    y = np.einsum("ths,shv->thv", mla_weights(q, k), v).reshape(len(x), -1)
    return linear(p["out"], y * sigmoid(linear(p["gate"], x)) if m.gate else y)


# ---------------------------------------------------------------------------------------------------------------- NSA
def nsa(m, p, x):
    """Compute the three branches query by query; the heads in a group share a selection."""
    q, k = queries_and_keys(m, p, x, x)
    n_kv = m.kv_heads or m.heads
    each, size, scale = m.heads // n_kv, m.block_size, 1 / math.sqrt(q.shape[-1])
    v = np.repeat(heads_of(convolved(m, p, "v", linear(p["v"], x)), n_kv), each, axis=1)
    gate = sigmoid(linear(p["gate"], x)).reshape(len(x), m.heads, 3)
    o = np.zeros(q.shape)
    for t in range(len(x)):
        ended = [range(c * size, (c + 1) * size) for c in range((t + 1) // size)]
        own, p_Hc = t // size, np.zeros((m.heads, len(ended)))
        for h in range(m.heads):
            if ended:
                p_Hc[h] = softmax(np.array([k[list(c), h].mean(0) @ q[t, h] * scale for c in ended]))
                o[t, h] += gate[t, h, 0] * sum(w * v[list(c), h].mean(0) for w, c in zip(p_Hc[h], ended, strict=True))
        for g in range(n_kv):
            weight = p_Hc[g * each : (g + 1) * each].mean(0)
            always = {0, own - 1, own} - {-1}
            others = sorted(set(range(own)) - always, key=lambda c: -weight[c])
            at = [j for c in always | set(others[: m.blocks - len(always)]) for j in range(c * size, (c + 1) * size)]
            at = [j for j in at if j <= t]
            for h in range(g * each, (g + 1) * each):
                for branch, js in ((1, at), (2, list(range(max(0, t + 1 - m.window), t + 1)))):
                    o[t, h] += gate[t, h, branch] * (softmax(scale * k[js, h] @ q[t, h]) @ v[js, h])
    return linear(p["out"], o.reshape(len(x), -1))


# --------------------------------------------------------------------------------------------------------- MSA and DSA
def rotate_first(x_TIN, m):
    n = m.index_rope if m.index_rope is not None else x_TIN.shape[-1] // 4 * 2
    return np.concatenate([rotate_halves(x_TIN[..., :n], m), x_TIN[..., n:]], -1) if n else x_TIN


def index_scores(m, p, x):
    """Return the scores of the index [T, rows, S]: a row per key head in MSA, one row in DSA."""
    n_heads = (m.kv_heads or m.heads) if m.name == "msa" else m.index_heads
    q, k = heads_of(linear(p["q"], x), n_heads), linear(p["k"], x)[:, None]
    if m.name == "msa":
        q, k = rms_norm(q, p["q_norm"]["g"], m.norm_eps), rms_norm(k, p["k_norm"]["g"], m.norm_eps)
    else:
        k = layer_norm(k, p["k_norm"]["g"], p["k_norm"]["b"], 1e-6)
    s = np.einsum("tin,sn->tis", rotate_first(q, m), rotate_first(k, m)[:, 0]) / math.sqrt(q.shape[-1])
    if m.name == "msa":
        return s
    w = linear(p["w"], x) / math.sqrt(n_heads)
    return sum(w[:, i, None] * np.maximum(s[:, i], 0) for i in range(n_heads))[:, None]


def indexed(m, p, x):
    """Attend to the keys that the index chooses, query by query."""
    q, k = queries_and_keys(m, p, x, x)
    v = heads_of(convolved(m, p, "v", linear(p["v"], x)), m.kv_heads or m.heads)
    v = np.repeat(v, m.heads // v.shape[1], axis=1)
    scores, o = index_scores(m, p["index"], x), np.zeros(q.shape)
    for t in range(len(x)):
        for h in range(m.heads):
            row = scores[t, h * scores.shape[1] // m.heads]
            if m.name == "msa":
                size, own = m.block_size, t // m.block_size
                best = sorted(range(own), key=lambda c: -row[c * size : (c + 1) * size].max())[: m.blocks - 1]
                at = [s for c in [*best, own] for s in range(c * size, (c + 1) * size) if s <= t]
            else:
                at = sorted(range(t + 1), key=lambda s: -row[s])[: m.top_k]
            o[t, h] = softmax(k[at, h] @ q[t, h] / math.sqrt(q.shape[-1])) @ v[at, h]
    y = o.reshape(len(x), -1)
    return linear(p["out"], y * sigmoid(linear(p["gate"], x)) if m.gate else y)


# ---------------------------------------------------------------------------------------------------------------- FoX
def mixed_with_before(p, x, y_TE, n):
    """Mix keys or values with the previous token's, with a data-dependent share per head."""
    y, share = heads_of(y_TE, n), sigmoid(linear(p, x))[..., None]
    return (share * shifted(y) + (1 - share) * y).reshape(y_TE.shape)


def fox_queries_keys(m, p, x):
    q, k = convolved(m, p, "q", linear(p["q"], x)), convolved(m, p, "k", linear(p["k"], x))
    n_kv = m.kv_heads or m.heads
    k = mixed_with_before(p["k_shift"], x, k, n_kv) if m.kv_shift else k
    q, k = heads_of(q, m.heads), heads_of(k, n_kv)
    if m.qk_norm:
        q = rms_norm(q, p["q_norm"]["g"].reshape(m.heads, -1), m.norm_eps)
        k = rms_norm(k, p["k_norm"]["g"].reshape(n_kv, -1), m.norm_eps)
    return q, np.repeat(k, m.heads // n_kv, axis=1)


def fox_weights(m, p, x):
    """Return weights [T, H, S]: e^score times the product of the gates after the key, up to the query's gate."""
    q, k = fox_queries_keys(m, p, x)
    gate = sigmoid(linear(p["forget"], x))
    weight = np.zeros((len(x), m.heads, len(x)))
    for i in range(len(x)):
        for j in range(max(0, i + 1 - (m.window or len(x))), i + 1):
            decay = gate[j + 1 : i + 1].prod(0)
            weight[i, :, j] = decay * np.exp((q[i] * k[j]).sum(-1) / math.sqrt(q.shape[-1]))
    return weight / weight.sum(-1, keepdims=True)


def fox(m, p, x):
    v, n_kv = convolved(m, p, "v", linear(p["v"], x)), m.kv_heads or m.heads
    v = heads_of(mixed_with_before(p["v_shift"], x, v, n_kv) if m.kv_shift else v, n_kv)
    o = np.einsum("ths,shv->thv", fox_weights(m, p, x), np.repeat(v, m.heads // n_kv, axis=1))
    if m.output_gate:
        o = rms_norm(o, p["norm"]["g"].reshape(m.heads, -1), m.norm_eps)
    y = o.reshape(len(x), -1)
    return linear(p["out"], y * sigmoid(linear(p["gate"], x)) if m.output_gate else y)


# --------------------------------------------------------------------------------------------------------------- PaTH
def path(m, p, x):
    """Multiply each key by the matrices of all later tokens in sequence."""
    n_kv = m.kv_heads or m.heads
    q, k, v = (heads_of(linear(p[name], x), n) for name, n in (("q", m.heads), ("k", n_kv), ("v", n_kv)))
    if m.qk_norm:
        q, k = (rms_norm(y, p[f"{name}_norm"]["g"], m.norm_eps) for name, y in (("q", q), ("k", k)))
    w = heads_of(short_conv(p["w_conv"], linear(p["w_out"], linear(p["w_in"], x))), n_kv)
    w = w / np.sqrt((w**2).sum(-1, keepdims=True) + 1e-6)
    beta, scale = 2 * sigmoid(linear(p["beta"], x)), 1 / math.sqrt(q.shape[-1])
    gate = sigmoid(linear(p["forget"], x)) ** scale if m.forget_gate else np.ones((len(x), m.heads))
    keys, decay, o, repeats = [], [], [], m.heads // n_kv
    for t in range(len(x)):
        keys = [key - beta[t, :, None] * (key * w[t]).sum(-1, keepdims=True) * w[t] for key in keys] + [k[t]]
        decay = [before * gate[t] for before in decay] + [np.ones(m.heads)]
        score = np.array([(q[t] * np.repeat(key, repeats, 0)).sum(-1) * scale for key in keys])
        weight = np.array(decay) * np.exp(score)
        o.append(np.einsum("sh,shv->hv", weight / weight.sum(0), np.repeat(v[: t + 1], repeats, 1)))
    return linear(p["out"], np.array(o).reshape(len(x), -1))


def parallax(m, p, x):
    """Subtract the covariance of the values and a second score from their mean."""
    n_kv = m.kv_heads or m.heads
    q, r = (heads_of(linear(p["q"][name], x), m.heads) for name in "qr")
    k, v = (heads_of(linear(p[name], x), n_kv) for name in "kv")
    if m.qk_norm:
        q, r, k = (rms_norm(y, p[f"{name}_norm"]["g"], 1e-5) for name, y in (("q", q), ("r", r), ("k", k)))
    if m.position == "rope":
        q, r, k = (rotate(y, m) for y in (q, r, k))
    k, v = (np.repeat(y, m.heads // n_kv, axis=1) for y in (k, v))
    o = np.zeros(q.shape)
    for i in range(len(x)):
        for h in range(m.heads):
            keys, values = k[: i + 1, h], v[: i + 1, h]
            weight, second = softmax(keys @ q[i, h] / math.sqrt(q.shape[-1])), keys @ r[i, h]
            covariance = weight @ (second[:, None] * values) - (weight @ second) * (weight @ values)
            o[i, h] = weight @ values - covariance
    y = o.reshape(len(x), -1)
    return linear(p["out"], y * sigmoid(linear(p["gate"], x)) if m.gate else y)


def wall(m, p, x):
    """Multiply every channel of a score by its decays after the key, up to the query's."""
    n_kv = m.kv_heads or m.heads
    q, k, v = (heads_of(linear(p[name], x), n) for name, n in (("q", m.heads), ("k", n_kv), ("v", n_kv)))
    if m.qk_norm:
        q, k = (rms_norm(y, p[f"{name}_norm"]["g"].reshape(y.shape[1:]), 1e-5) for name, y in (("q", q), ("k", k)))
    k, v = (np.repeat(y, m.heads // n_kv, axis=1) for y in (k, v))
    kept, o = heads_of(sigmoid(linear(p["decay"], x) + p["decay_bias_E"]), m.heads), np.zeros(q.shape)
    for i in range(len(x)):
        for h in range(m.heads):
            s = [(q[i, h] * k[j, h] * kept[j + 1 : i + 1, h].prod(0)).sum() for j in range(i + 1)]
            o[i, h] = softmax(np.array(s) / math.sqrt(q.shape[-1])) @ v[: i + 1, h]
    y = o.reshape(len(x), -1)
    return linear(p["out"], y * sigmoid(linear(p["gate"], x)) if m.gate else y)


# ----------------------------------------------------------------------------------------------- convolution, Taylor
def based_conv(m, p, x):
    return linear(p["out"], short_conv(p["conv"], linear(p["enter"], x)) * linear(p["gate"], x))


def based_linear(m, p, x):
    """Replace e^s by 1 + s + s^2 / 2."""
    q, k, v = (heads_of(linear(p[name], x), m.heads) for name in "qkv")
    s = np.einsum("thk,shk->ths", q, k) / math.sqrt(q.shape[-1])
    weight = (1 + s + s**2 / 2) * np.tri(len(x))[:, None]
    o = np.einsum("ths,shv->thv", weight, v) / weight.sum(-1, keepdims=True)
    return linear(p["out"], o.reshape(len(x), -1))


# ----------------------------------------------------------------------------------------------------- state spaces
def shared_decay(p, u):
    """Return step size and decay for a scalar transition per token."""
    step = softplus(u @ p["w"] + p["b"])
    return step, np.exp(-np.exp(p["alpha"]) * step)


def mamba1(m, p, u):
    x, z = linear(p["x"], u), linear(p["z"], u)
    x = short_conv(p["conv"], x) if m.conv else silu(x)
    b, c = np.split(linear(p["bc"], x), 2, axis=-1)
    if m.decay == "one_dt":
        step = np.broadcast_to(shared_decay(p["decay"], x)[0][:, None], x.shape)
    else:
        step = softplus(linear(p["dt"], linear(p["delta"], x)) + p["dt_bias"])
    h, y = np.zeros((x.shape[1], m.state)), np.zeros_like(x)
    for t in range(len(x)):
        if m.decay == "full":
            decay = np.exp(-step[t][:, None] * np.exp(p["a_log"]))
        else:
            decay = 1.0 if m.decay == "none" else shared_decay(p["decay"], x)[1][t]
        h = decay * h + np.outer(step[t] * x[t], b[t])
        y[t] = h @ c[t] + p["skip"] * x[t]
    return linear(p["out"], y * silu(z))


def mamba2(m, p, u):
    x, bc = linear(p["x"], u), linear(p["bc"], u)
    x, bc = (short_conv(p["conv_x"], x), short_conv(p["conv_bc"], bc)) if m.conv else (silu(x), silu(bc))
    b, c = np.split(bc, 2, axis=-1)
    step = softplus(linear(p["dt"], u) + p["dt_bias"])
    n_heads = step.shape[1]
    x = heads_of(x, n_heads)
    state, y = np.zeros((n_heads, m.state, m.head_dim)), np.zeros_like(x)
    for t in range(len(u)):
        if m.decay == "full":
            decay = np.exp(-np.exp(p["a_log"]) * step[t])
        else:  # only the transition is shared; the input keeps its step size per head
            decay = np.full(n_heads, 1.0 if m.decay == "none" else shared_decay(p["decay"], u)[1][t])
        for h in range(n_heads):
            state[h] = decay[h] * state[h] + np.outer(b[t], step[t, h] * x[t, h])
            y[t, h] = c[t] @ state[h] + p["skip"][h] * x[t, h]
    y = y.reshape(len(u), -1) * (silu(linear(p["z"], u)) if m.gate else 1)
    return linear(p["out"], rms_norm(y, p["norm"]["g"], 1e-5) if m.norm else y)


def log_linear_mamba2(m, p, u):
    """Loop over token pairs; the highest bit in which their positions differ determines the level."""
    x, bc = (short_conv(p[f"conv_{name}"], linear(p[name], u)) for name in ("x", "bc"))
    b, c = np.split(bc, 2, axis=-1)
    step = softplus(linear(p["dt"], u) + p["dt_bias"])
    n_heads = step.shape[1]
    x, weight = heads_of(x, n_heads), softplus(p["level_scale"] * heads_of(linear(p["level"], u), n_heads))
    gone = np.cumsum(np.exp(p["a_log"]) * step, axis=0)
    y = p["skip"][:, None] * x
    for t in range(len(u)):
        for s in range(t + 1):
            level = min((t ^ s).bit_length(), m.levels - 1)
            y[t] += (weight[t, :, level] * np.exp(gone[s] - gone[t]) * (c[t] @ b[s]) * step[s])[:, None] * x[s]
    return linear(p["out"], rms_norm(y.reshape(len(u), -1) * silu(linear(p["z"], u)), p["norm"]["g"], 1e-5))


def turned_by(turn, row):
    """Multiply the first pairs of neighboring channels, as complex numbers, by `turn`."""
    n = 2 * len(turn)
    pairs = (row[0:n:2] + 1j * row[1:n:2]) * turn
    return np.concatenate([np.stack([pairs.real, pairs.imag], -1).ravel(), row[n:]])


def mamba3(m, p, u):
    """Treat channel pairs as complex numbers, rotated by a cumulative product on the unit circle."""
    z, x, bc = linear(p["z"], u), linear(p["x"], u), linear(p["bc"], u)
    b, c = (rms_norm(half, p[f"{name}_norm"]["g"], 1e-5) for name, half in zip("bc", np.split(bc, 2, axis=-1)))
    step, trap, a = softplus(linear(p["dt"], u) + p["dt_bias"]), sigmoid(linear(p["trap"], u)), linear(p["rate"], u)
    heavy_tail = np.where(a > 0, 1 + a, 1 / (1 + np.abs(a)))
    a = -np.maximum(softplus(a) if m.rate == "softplus" else heavy_tail, 1e-4)
    n_heads = step.shape[1]
    x, z = heads_of(x, n_heads), heads_of(z, n_heads)
    frequency = math.pi * np.tanh(linear(p["angle"], u))
    y = np.zeros_like(x)
    for h in range(n_heads):
        turned = np.ones(frequency.shape[1], complex)
        s, before = np.zeros((m.state, x.shape[-1])), np.zeros((m.state, x.shape[-1]))
        for t in range(len(u)):
            turned = turned * np.exp(1j * frequency[t] * step[t, h])
            alpha, entering = np.exp(a[t, h] * step[t, h]), np.outer(turned_by(turned, b[t] + p["b_bias"][h]), x[t, h])
            s = alpha * s + step[t, h] * ((1 - trap[t, h]) * alpha * before + trap[t, h] * entering)
            y[t, h] = turned_by(turned, c[t] + p["c_bias"][h]) @ s + p["skip"][h] * x[t, h]
            before = entering
    y = rms_norm(y, p["norm"]["g"].reshape(n_heads, -1), 1e-5) if m.norm else y
    return linear(p["out"], (y * silu(z)).reshape(len(u), -1))


# ---------------------------------------------------------------------------------------- delta rule, decays by channel
def delta(m, p, x):
    n_values = getattr(m, "value_heads", None) or m.heads
    q, k, v = (
        heads_of(short_conv(p.get(f"{name}_conv"), linear(p[name], x)), n)
        for name, n in (("q", m.heads), ("k", m.heads), ("v", n_values))
    )
    q, k, beta = unit(q) / math.sqrt(q.shape[-1]), unit(k), sigmoid(linear(p["beta"], x))
    q, k = (np.repeat(y, n_values // m.heads, axis=1) for y in (q, k))
    gated = m.name == "gated_deltanet"
    y = np.zeros_like(v)
    for h in range(n_values):
        s = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            if gated:
                step = softplus(linear(p["decay"], x)[t, h] + p["step_bias_H"][h])
                s = s * np.exp(-np.exp(p["log_rate_H"][h]) * step)
            s = s + np.outer(k[t, h], beta[t, h] * (v[t, h] - k[t, h] @ s))
            y[t, h] = q[t, h] @ s
    y = rms_norm(y, p["norm"]["g"], m.norm_eps).reshape(len(x), -1)
    return linear(p["out"], y * silu(linear(p["gate"], x)) if gated and m.gate else y)


def delta_product(m, p, x):
    def of_steps(y):
        """Reshape [T, ...] to [T, n, H, ...]; the columns are ordered by head, then step."""
        return y.reshape(len(x), m.heads, m.steps, -1).swapaxes(1, 2)

    q = heads_of(short_conv(p.get("q_conv"), linear(p["q"], x)), m.heads)
    k, v = (of_steps(short_conv(p.get(f"{name}_conv"), linear(p[name], x))) for name in "kv")
    beta = (2 if m.allow_negative_eigenvalues else 1) * of_steps(sigmoid(linear(p["beta"], x)))[..., 0]
    q, k = unit(q) / math.sqrt(q.shape[-1]), unit(k)
    y = np.zeros((len(x), m.heads, v.shape[-1]))
    for h in range(m.heads):
        s = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            if m.decay:
                step = softplus(linear(p["decay"], x)[t, h] + p["step_bias_H"][h])
                s = s * np.exp(-np.exp(p["log_rate_H"][h]) * step)
            for j in range(m.steps):
                s = s + np.outer(k[t, j, h], beta[t, j, h] * (v[t, j, h] - k[t, j, h] @ s))
            y[t, h] = q[t, h] @ s
    y = rms_norm(y, p["norm"]["g"], m.norm_eps).reshape(len(x), -1)
    return linear(p["out"], y * silu(linear(p["gate"], x)) if m.gate else y)


def gla(m, p, x):
    q, k, v = (heads_of(linear(p[name], x), m.heads) for name in "qkv")
    decay = heads_of(sigmoid(linear(p["decay_out"], linear(p["decay_in"], x))) ** (1 / 16), m.heads)
    y = np.zeros_like(v)
    for h in range(m.heads):
        s = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            s = np.diag(decay[t, h]) @ s + np.outer(k[t, h], v[t, h])
            y[t, h] = q[t, h] @ s / math.sqrt(q.shape[-1])
    y = rms_norm(y, p["norm"]["g"], m.norm_eps).reshape(len(x), -1)
    return linear(p["out"], y * silu(linear(p["gate"], x)) if m.gate else y)


def mlstm(m, p, x):
    q, k, v = (heads_of(linear(p[name], x), m.heads) for name in "qkv")
    i, f = (
        m.gate_cap * np.tanh((linear(p[name], x) + p[f"{name}_bias_H"]) / m.gate_cap) for name in ("input", "forget")
    )
    y = np.zeros_like(v)
    for h in range(m.heads):
        c, n = np.zeros((q.shape[-1], v.shape[-1])), np.zeros(q.shape[-1])
        for t in range(len(x)):
            c = sigmoid(f[t, h]) * c + np.exp(i[t, h]) * np.outer(k[t, h], v[t, h])
            n = sigmoid(f[t, h]) * n + np.exp(i[t, h]) * k[t, h]
            q_h = q[t, h] / math.sqrt(q.shape[-1])
            y[t, h] = q_h @ c / max(abs(q_h @ n), 1)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + m.norm_eps)
    y = y.reshape(len(x), -1) * p["gain_E"]
    return linear(p["out"], y * sigmoid(linear(p["gate"], x)) if m.gate else y)


def kda(m, p, x):
    q, k, v = (heads_of(short_conv(p.get(f"{name}_conv"), linear(p[name], x)), m.heads) for name in "qkv")
    q, k, beta = unit(q) / math.sqrt(q.shape[-1]), unit(k), sigmoid(linear(p["beta"], x))
    if m.channel_gates:
        erase, v = heads_of(beta, m.heads), heads_of(sigmoid(linear(p["write"], x)), m.heads) * v
    else:
        erase, v = np.repeat(beta[..., None], k.shape[-1], -1), beta[..., None] * v
    step = heads_of(linear(p["decay_out"], linear(p["decay_in"], x)) + p["step_bias_E"], m.heads)
    rate = np.exp(p["log_rate_H"])[:, None]
    g = -rate * softplus(step) if m.lower_bound is None else m.lower_bound * sigmoid(rate * step)
    y = np.zeros_like(v)
    for h in range(m.heads):
        s = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            s = np.diag(np.exp(g[t, h])) @ s
            s = s + np.outer(k[t, h], v[t, h] - (erase[t, h] * k[t, h]) @ s)
            y[t, h] = q[t, h] @ s
    y = rms_norm(y, p["norm"]["g"], m.norm_eps).reshape(len(x), -1)
    if not m.gate:
        return linear(p["out"], y)
    gate = linear(p["gate"], x) if m.gate_rank == "full" else linear(p["gate_out"], linear(p["gate_in"], x))
    return linear(p["out"], y * sigmoid(gate))


def comba(m, p, x):
    q, k, v = (heads_of(short_conv(p.get(f"{name}_conv"), linear(p[name], x)), m.heads) for name in "qkv")
    shrunk = sigmoid(p["inner_decay_H"])[:, None] if m.inner_decay else 1.0
    q = q if m.correction is None else q - p["correction_H"][:, None] * shrunk * k
    q, k, beta = unit(q) / math.sqrt(q.shape[-1]), unit(k), sigmoid(linear(p["beta"], x))
    predicting = shrunk * k
    decay = np.exp(-np.exp(p["log_rate_H"]) * softplus(linear(p["decay"], x) + p["step_bias_H"]))
    y = np.zeros_like(v)
    for h in range(m.heads):
        s = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            s = decay[t, h] * s + np.outer(k[t, h], beta[t, h] * (v[t, h] - predicting[t, h] @ s))
            y[t, h] = q[t, h] @ s
    y = rms_norm(y, p["norm"]["g"], m.norm_eps).reshape(len(x), -1)
    return linear(p["out"], y * sigmoid(linear(p["gate"], x)) if m.gate else y)


def preconditioned(m, p, x):
    """Gated DeltaNet or KDA, with a second, decayed sum of squared keys."""
    q, k, v = (heads_of(short_conv(p.get(f"{name}_conv"), linear(p[name], x)), m.heads) for name in "qkv")
    q, k, beta = unit(q) / math.sqrt(q.shape[-1]), unit(k), sigmoid(linear(p["beta"], x))
    rate, own = np.exp(p["log_rate_H"])[:, None], p["precond"]
    if m.name == "precond_kda":
        step = heads_of(linear(p["decay_out"], linear(p["decay_in"], x)) + p["step_bias_E"], m.heads)
        g = -rate * softplus(step) if m.lower_bound is None else m.lower_bound * sigmoid(rate * step)
        gate = sigmoid(linear(p["gate_out"], linear(p["gate_in"], x))) if m.gate else 1.0
    else:
        g = -rate * softplus(linear(p["decay"], x) + p["step_bias_H"])[..., None]
        gate = silu(linear(p["gate"], x)) if m.gate else 1.0
    own_g = -np.exp(own["log_rate_H"]) * softplus(linear(own["decay"], x) + own["step_bias_H"])
    own_beta = sigmoid(linear(own["beta"], x))
    y = np.zeros_like(v)
    for h in range(m.heads):
        s, curvature = np.zeros((q.shape[-1], v.shape[-1])), np.zeros(q.shape[-1])
        for t in range(len(x)):
            curvature = np.exp(own_g[t, h]) * curvature + own_beta[t, h] * k[t, h] ** 2
            u = np.log(curvature + 1e-6) - own["center_H"][h]
            written = k[t, h] * m.precond_bound ** (-u / (1 + abs(u)))
            s = np.diag(np.broadcast_to(np.exp(g[t, h]), k[t, h].shape)) @ s
            s = s + np.outer(written, beta[t, h] * (v[t, h] - k[t, h] @ s))
            y[t, h] = q[t, h] @ s
    return linear(p["out"], rms_norm(y, p["norm"]["g"], m.norm_eps).reshape(len(x), -1) * gate)


def mesa_net(m, p, x):
    """Solve each token's system exactly."""
    q, k = (unit(heads_of(short_conv(p.get(f"{name}_conv"), linear(p[name], x)), m.heads)) for name in "qk")
    v, beta, kept = heads_of(linear(p["v"], x), m.heads), sigmoid(linear(p["beta"], x)), sigmoid(linear(p["decay"], x))
    ridge = (softplus(p["ridge_E"]) + m.min_ridge).reshape(m.heads, -1)
    y = np.zeros_like(v)
    for h in range(m.heads):
        g, s = np.zeros((k.shape[-1], k.shape[-1])), np.zeros((k.shape[-1], v.shape[-1]))
        for t in range(len(x)):
            g = kept[t, h] * g + beta[t, h] * np.outer(k[t, h], k[t, h])
            s = kept[t, h] * s + beta[t, h] * np.outer(k[t, h], v[t, h])
            y[t, h] = np.linalg.solve(g + np.diag(ridge[h]), q[t, h]) @ s
    y = rms_norm(y, p["norm"]["g"], m.norm_eps).reshape(len(x), -1)
    return linear(p["out"], y * silu(linear(p["gate"], x)) if m.gate else y)


def ttt_linear(m, p, x):
    """Take gradient steps token by token, with the Jacobian of the normalised prediction.

    Parameters and inputs may be complex, for derivatives by complex steps.
    """
    q = k = linear(p["q"], x)
    q, k = (causal_conv(p["q_conv"], q), causal_conv(p["k_conv"], k)) if m.conv else (q, linear(p["k"], x))
    q, k = (turned_neighbors(heads_of(y, m.heads), 1e4, np.arange(len(x)) % m.mini_batch) for y in (q, k))
    v, y, n = heads_of(linear(p["v"], x), m.heads), np.zeros_like(q), q.shape[-1]
    rate = m.base_lr * sigmoid(linear(p["rate"], x)) / n
    gains, biases, starts = (z.reshape(m.heads, n) for z in (p["inner_norm"]["g"], p["inner_norm"]["b"], p["b_E"]))
    for h, (gain, bias) in enumerate(zip(gains, biases, strict=True)):
        w, b = p["w_HKK"][h], starts[h]
        for t in range(len(x)):
            i = t % m.mini_batch
            if i == 0:
                dw, db = np.zeros_like(w), np.zeros_like(b)
            z = k[t, h] @ w + b
            unit = layer_norm(z, 1.0, 0.0, m.norm_eps)
            jacobian = np.eye(n) - 1 / n - np.outer(unit, unit) / n  # symmetric
            jacobian = jacobian / np.sqrt(((z - z.mean()) ** 2).mean() + m.norm_eps)
            d = rate[t, h] * jacobian @ (gain * (gain * unit + bias - (v[t, h] - k[t, h])))
            dw, db = dw + np.outer(k[t, h], d), db + d
            share = np.maximum(1 / (i + 1) + p["token_M"][i], 0)
            now_w, now_b = w - share * dw, b - share * db
            y[t, h] = q[t, h] + layer_norm(q[t, h] @ now_w + now_b, gain, bias, m.norm_eps)
            if i == m.mini_batch - 1:
                w, b = now_w, now_b
    y = layer_norm(y.reshape(len(x), -1), p["norm"]["g"], p["norm"]["b"], m.norm_eps)
    return linear(p["out"], y * gelu_tanh(linear(p["gate"], x)) if m.gate else y)


# --------------------------------------------------------------------------------------------------------------- RWKV
def shifted(x):
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def lerp(x, mu):
    return x + (shifted(x) - x) * mu


def channel_mix(p, x):
    y = linear(p["v"], relu_squared(linear(p["k"], lerp(x, p["mu_k"]))))
    return sigmoid(linear(p["r"], lerp(x, p["mu_r"]))) * y if "r" in p else y


def rwkv5_or_6(m, p, x):
    omega = np.broadcast_to(p["omega"], x.shape)
    if m.name == "rwkv5":
        x_r, x_k, x_v, x_g = (lerp(x, mu) for mu in p["mu"])
    else:
        parts = np.split(np.tanh(linear(p["w1"], lerp(x, p["mu_x"]))), 5, axis=-1)
        x_w, x_k, x_v, x_r, x_g = (lerp(x, mu + part @ w) for mu, part, w in zip(p["mu"], parts, p["w2"], strict=True))
        omega = omega + linear(p["d2"], np.tanh(linear(p["d1"], x_w)))
    n = x.shape[1] // m.head_dim
    r, k, v = (heads_of(linear(p[name], y), n) for name, y in (("r", x_r), ("k", x_k), ("v", x_v)))
    w, u = heads_of(np.exp(-np.exp(omega)), n), p["u"].reshape(n, -1)
    y = np.zeros_like(v)
    for h in range(n):
        s = np.zeros((m.head_dim, m.head_dim))
        for t in range(len(x)):
            new = np.outer(k[t, h], v[t, h])
            y[t, h] = r[t, h] @ (s + u[h][:, None] * new)
            s = w[t, h][:, None] * s + new
    return linear(p["out"], head_norm(y, p["norm"]) * silu(linear(p["g"], x_g)))


def lora(p, x, activation=lambda x: x):
    return p.get("bias", 0.0) + activation(x @ p["a"]) @ p["b"]


def value_residual(p, x_v, v, v_first):
    """Mix the first layer's values into a later layer's values with a learned share."""
    return v if v_first is None else v + (v_first - v) * sigmoid(lora(p["v_lora"], x_v))


def rwkv7(m, p, x, v_first):
    mixed = {name: lerp(x, mu) for name, mu in p["mu"].items()}
    r, k, own = (linear(p[name], mixed[name]) for name in "rkv")
    v = value_residual(p, mixed["v"], own, v_first)
    w = np.exp(-math.exp(-0.5) * sigmoid(lora(p["w_lora"], mixed["w"], np.tanh)))
    eta = sigmoid(lora(p["a_lora"], mixed["a"]))
    kappa = unit(heads_of(k * p["k_k"], m.heads), 0.0)
    k = k * (1 + (eta - 1) * p["k_a"])
    r, k, v, w, eta = (heads_of(y, m.heads) for y in (r, k, v, w, eta))
    y = np.zeros_like(v)
    for h in range(m.heads):
        s = np.zeros((v.shape[-1], k.shape[-1]))  # values by keys, as in the paper
        for t in range(len(x)):
            removed = np.outer(s @ kappa[t, h], kappa[t, h] * eta[t, h])
            s = s * w[t, h] - removed + np.outer(v[t, h], k[t, h])
            y[t, h] = s @ r[t, h]
    bonus = (r * k * p["r_k"].reshape(m.heads, -1)).sum(-1, keepdims=True) * v
    y = head_norm(y, p["norm"]) + bonus.reshape(len(x), -1)
    return linear(p["out"], y * lora(p["g_lora"], mixed["g"], sigmoid)), own


class Core:
    """The settings of the attention inside RWKV-7's shell, with the names of the attention mixers."""

    def __init__(self, m):
        self.heads, self.position, self.rope_base = m.heads, m.position, m.rope_base
        self.chunk_size, self.selection, self.top_k = m.chunk_size, m.core.removeprefix("top1_"), 1
        self.qk_norm = m.core.startswith("top1") if m.qk_norm is None else m.qk_norm
        self.window = m.window if m.core == "window" else None


def rwkv7_shell(m, p, x, v_first):
    mixed = dict.fromkeys("rkvg", x)
    if m.token_shift:
        mixed |= {name: lerp(x, mu) for name, mu in p["mu"].items()}
    core = Core(m)
    q, k = queries_and_keys(core, p["core"], mixed["r"], mixed["k"])
    own = linear(p["core"]["v"], mixed["v"])
    v = value_residual(p, mixed["v"], own, v_first) if m.value_residual else own
    attend = top1_chunk if m.core.startswith("top1") else softmax_attention
    o = attend(core, q, k, heads_of(v, m.heads))
    y = head_norm(o, p["norm"]) if m.head_norm else o.reshape(len(x), -1)
    y = y * lora(p["g_lora"], mixed["g"], sigmoid) if m.gate else y
    return linear(p["core"]["out"], y), own


# -------------------------------------------------------------------------------------------------------- whole models
MIXERS = {
    **dict.fromkeys(CORES, attention),
    "based_conv": based_conv, "based_linear": based_linear, "mamba1": mamba1, "mamba2": mamba2,
    "log_linear_mamba2": log_linear_mamba2, "mamba3": mamba3, "fox": fox, "path": path, "nsa": nsa,
    "msa": indexed, "dsa": indexed,
    "deltanet": delta, "gated_deltanet": delta, "gated_deltaproduct": delta_product, "gla": gla,
    "mesa_net": mesa_net, "ttt_linear": ttt_linear, "parallax": parallax, "wall": wall, "comba": comba,
    "precond_gated_deltanet": preconditioned, "precond_kda": preconditioned,
    "kda": kda, "mla": mla, "mlstm": mlstm, "rwkv5": rwkv5_or_6, "rwkv6": rwkv5_or_6,
}  # fmt: skip
CARRYING = {"rwkv7": rwkv7, "rwkv7_shell": rwkv7_shell}


def mlp(config, p, x):
    inner = {name: linear(p[name], x) for name in ("up", "gate") if name in p}
    inner = {name: canon(p[f"{name}_conv"], y) if f"{name}_conv" in p else y for name, y in inner.items()}
    act = silu if config.kind == "swiglu" else gelu_tanh if config.approximate_gelu else gelu
    return linear(p["down"], act(inner["up"]) if config.kind == "gelu" else act(inner["gate"]) * inner["up"])


def as_float64(tree):
    return {k: as_float64(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)


def layer_of(tree, index):
    """Return one layer's parameters from a stack."""
    return {k: layer_of(v, index) for k, v in tree.items()} if isinstance(tree, dict) else tree[index]


def layers(config, params):
    """Yield mixer settings and parameters of all layers in order; the pattern repeats."""
    mixers = config.mixers
    for i in range(config.n_layers):
        yield mixers[i % len(mixers)], layer_of(params["blocks"][str(i % len(mixers))], i // len(mixers))


def attention_inputs(m, p, x):
    """Return attention settings, queries and keys [T, H, K], or None."""
    if m.name == "fox":
        return m, *fox_queries_keys(m, p, x)
    if m.name == "mla":
        return m, *mla_operands(m, p, x)[:2]
    if m.name in CORES or m.name in ("nsa", "msa", "dsa"):
        return m, *queries_and_keys(m, p, x, x)
    if m.name != "rwkv7_shell":
        return None
    x_q, x_k = (lerp(x, p["mu"][name]) if m.token_shift else x for name in "rk")
    return Core(m), *queries_and_keys(Core(m), p["core"], x_q, x_k)


def weights_of(m, p, x):
    """Return the softmax weights over the past [T, H, S], or None."""
    if m.name == "fox":
        return fox_weights(m, p, x)
    if m.name in ("nsa", "msa", "dsa") or m.name.startswith("top1") or getattr(m, "core", "").startswith("top1"):
        return None
    if m.name == "mla":
        return mla_weights(*mla_operands(m, p, x)[:2])
    inputs = attention_inputs(m, p, x)
    return None if inputs is None else softmax_weights(*inputs)


def source_mix(config, p, sources):
    """Return a sub-layer's softmax mix of earlier outputs."""
    scores = np.stack([rms_norm(s, p["gain_D"], config.norm_eps) @ p["query_D"] for s in sources], axis=-1)
    return np.einsum("tn,ntd->td", softmax(scores), np.stack(sources))


def hidden(config, params, row, mixer_inputs=None):
    """Return the residual stream, or the last mix of attention residuals, after the last layer [T, D].

    Appends (settings, parameters, input) of each layer's mixer to the list `mixer_inputs`.
    """
    x, v_first = params["embed"][row], None
    if config.embed_norm:
        x = norm(config, params["embed_norm"], x)
    if config.learned_positions:
        x = x + params["positions"][: len(x)]
    sources, n = [], 0

    def read(mix):
        """Return a sub-layer's input before its norm, and update the stream and the sources."""
        nonlocal x, n
        if config.attn_residual is None:
            return x
        mixed = source_mix(config, mix, [*sources, x])
        if n % config.attn_residual == 0:
            sources.append(x)
            x = 0.0
        n += 1
        return mixed

    for m, p in layers(config, params):
        if m.name == "post_norm_attention":
            if mixer_inputs is not None:
                mixer_inputs.append((m, p["mixer"], x))
            x = x + norm(config, p["norm1"], attention(m, p["mixer"], x))
            x = x + norm(config, p["norm2"], mlp(config.mlp, p["mlp"], x))
            continue
        h = norm(config, p["norm1"], read(p.get("mix1")))
        h = canon(p["canon_a"], h) if "A" in config.canon else h
        h = lerp(h, p["token_shift"]["mu"]) if config.token_shift else h
        if mixer_inputs is not None:
            mixer_inputs.append((m, p["mixer"], h))
        if m.name in CARRYING:
            y, own = CARRYING[m.name](m, p["mixer"], h, v_first)
            v_first = own if v_first is None else v_first
        else:
            y = MIXERS[m.name](m, p["mixer"], h)
        x = x + y
        if m.name.startswith("rwkv"):
            x = x + channel_mix(p["mlp"], norm(config, p["norm2"], x))
        elif config.mlp.kind != "none":
            h = norm(config, p["norm2"], read(p.get("mix2")))
            x = x + mlp(config.mlp, p["mlp"], canon(p["canon_c"], h) if "C" in config.canon else h)
    return x if config.attn_residual is None else source_mix(config, params["mix"], [*sources, x])


def logits(config, params, tokens_BT):
    """Return the logits [B, T, O] for a `ModelConfig` and its parameters."""
    params = as_float64(params)
    head = params["embed"].T if config.tie_embeddings else params["head"]
    return np.stack([norm(config, params["norm"], hidden(config, params, row)) @ head for row in tokens_BT])


def loss(config, params, tokens_BT1):
    """Return the summed next-token loss in nats for rows of T + 1 tokens."""
    tokens_BT1 = np.asarray(tokens_BT1)
    p = softmax(logits(config, params, tokens_BT1[:, :-1]))
    return -np.log(np.take_along_axis(p, tokens_BT1[:, 1:, None], -1)).sum()


def queries_and_keys_of_layers(config, params, row):
    """Return (queries, keys), each [T, H, K], or None, per layer."""
    mixer_inputs: list[Any] = []
    hidden(config, as_float64(params), row, mixer_inputs)
    return [None if (inputs := attention_inputs(*each)) is None else inputs[1:] for each in mixer_inputs]


def attention_entropy(config, params, tokens_BT):
    """Return the mean entropy in nats and relative to ln(i + 1), each [L, B].

    The means are over heads and positions i >= 1, for the layers with softmax weights.
    """
    params, nats, shares = as_float64(params), [], []
    for row in tokens_BT:
        mixer_inputs: list[Any] = []
        hidden(config, params, row, mixer_inputs)
        entropies = [entropy(w)[1:] for each in mixer_inputs if (w := weights_of(*each)) is not None]
        nats.append([e.mean() for e in entropies])
        shares.append([(e / np.log(np.arange(2, len(row) + 1))[:, None]).mean() for e in entropies])
    return np.array(nats).T, np.array(shares).T
