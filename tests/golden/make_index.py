"""Makes msa.npz and dsa.npz: layers with an index, their losses and gradients, in float64 NumPy.

    python tests/golden/make_index.py

Written from the equations of DeepSeek-V3.2, section 2.1, and of MiniMax Sparse Attention (arXiv 2606.13392), query by
query, with the norms, rotation and ties of the public code (transformers, `models/deepseek_v32` and
`models/minimax_m3_vl`). Gradients are central differences with the choice held fixed, and for the index's loss also its
input and the attention weights. The module imports nothing from seqjax.
"""

import math
from pathlib import Path

import numpy as np

T, D, HEADS, GROUPS, K = 29, 8, 4, 2, 4
BASE = 10_000.0


def rms_norm(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain


def layer_norm(x, gain, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain + bias


def rotated(x, n):
    """Rotate the first n channels of [T, heads, channels] by halves."""
    half = n // 2
    angle = np.arange(len(x))[:, None, None] * BASE ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:n]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag, x[..., n:]], -1)


def softmax(s):
    e = np.exp(s - s.max())
    return e / e.sum()


def queries_keys_values(p, x, norm):
    q, k, v = ((x @ p[f"{name}.w"]).reshape(T, -1, K) for name in "qkv")
    if norm:
        q, k = rms_norm(q, p["q_norm.g"]), rms_norm(k, p["k_norm.g"])
    return rotated(q, K), rotated(k, K), v


def attention(p, x, read, norm):
    """Return the output, and the weights of each head over the keys that each query reads; `read[t][g]` lists them."""
    q, k, v = queries_keys_values(p, x, norm)
    each = HEADS // GROUPS
    o, weights = np.zeros(q.shape), {}
    for t in range(T):
        for h in range(HEADS):
            keys = read[t][h // each]
            weights[t, h] = softmax(k[keys, h // each] @ q[t, h] / math.sqrt(K))
            o[t, h] = weights[t, h] @ v[keys, h // each]
    return o.reshape(T, -1) @ p["out.w"], weights


# ---------------------------------------------------------------------------------------------------------------- MSA
N, ROTATED, BLOCK, BLOCKS = 6, 4, 3, 3


def msa_scores(p, x):
    """Return the scores of the index [T, G, S]."""
    q = rms_norm((x @ p["index.q.w"]).reshape(T, GROUPS, N), p["index.q_norm.g"])
    k = rms_norm((x @ p["index.k.w"]).reshape(T, 1, N), p["index.k_norm.g"])
    return np.einsum("tgn,sn->tgs", rotated(q, ROTATED), rotated(k, ROTATED)[:, 0]) / math.sqrt(N)


def msa_read(scores):
    read = []
    for t in range(T):
        own, row = t // BLOCK, []
        for g in range(GROUPS):
            best = sorted(range(own), key=lambda c: -scores[t, g, c * BLOCK : (c + 1) * BLOCK].max())
            chosen = sorted([*best[: BLOCKS - 1], own])
            row.append([s for c in chosen for s in range(c * BLOCK, (c + 1) * BLOCK) if s <= t])
        read.append(row)
    return read


# ---------------------------------------------------------------------------------------------------------------- DSA
INDEX_HEADS, TOP_K = 3, 6


def dsa_scores(p, x):
    """Return the scores of the index, equal for all groups, [T, G, S]."""
    q = rotated((x @ p["index.q.w"]).reshape(T, INDEX_HEADS, N), ROTATED)
    k = rotated(layer_norm((x @ p["index.k.w"]), p["index.k_norm.g"], p["index.k_norm.b"])[:, None], ROTATED)[:, 0]
    w = x @ p["index.w.w"] / math.sqrt(INDEX_HEADS)
    scores = np.einsum("ti,tis->ts", w, np.maximum(np.einsum("tin,sn->tis", q, k) / math.sqrt(N), 0))
    return np.repeat(scores[:, None], GROUPS, axis=1)


def dsa_read(scores):
    best = [sorted(range(t + 1), key=lambda s: -scores[t, 0, s])[:TOP_K] for t in range(T)]
    return [[sorted(keys)] * GROUPS for keys in best]


# -------------------------------------------------------------------------------------------------------------- layers
def divergence(scores, read, weights, shared):
    """Return the mean over queries and score rows; with `shared`, one row serves all heads."""
    each, total = HEADS // GROUPS, 0.0
    for t in range(T):
        for rows in [range(HEADS)] if shared else [range(g * each, (g + 1) * each) for g in range(GROUPS)]:
            g = rows[0] // each
            p = np.mean([weights[t, h] for h in rows], axis=0)
            total += (p * (np.log(p) - np.log(softmax(scores[t, g, read[t][g]])))).sum()
    return total / (T * (1 if shared else GROUPS))


def differences(function, x):
    """Return the gradient of a function by central differences."""
    gradient = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        old, values = x[at], []
        for step in (1e-5, -1e-5):
            x[at] = old + step
            values.append(function())
        x[at] = old
        gradient[at] = (values[0] - values[1]) / 2e-5
    return gradient


def layer(shapes, scores_of, read_of, *, norm, shared):
    rng = np.random.default_rng(0)
    p = {name: 0.5 * rng.normal(size=shape) + (name[-1] == "g") for name, shape in shapes.items()}
    x, weight = rng.normal(size=(T, D)), rng.normal(size=(T, D))
    p, x = {name: y.astype(np.float32).astype(np.float64) for name, y in p.items()}, x.astype(np.float32).astype(float)
    scores = scores_of(p, x)
    read = read_of(scores)
    y, weights = attention(p, x, read, norm)
    arrays = {"x": x[None], "y": y[None], "weight": weight[None], "loss": divergence(scores, read, weights, shared)}
    language = lambda: (attention(p, x, read, norm)[0] * weight).sum()  # noqa: E731
    auxiliary = lambda: divergence(scores_of(p, x), read, weights, shared)  # noqa: E731
    arrays["dx"] = differences(language, x)[None]
    for name, value in p.items():
        arrays[f"p.{name}"] = value
        arrays[f"g.{name}"] = differences(auxiliary if name.startswith("index") else language, value)
    return arrays


def main():
    projections = {"q.w": (D, HEADS * K), "k.w": (D, GROUPS * K), "v.w": (D, GROUPS * K), "out.w": (HEADS * K, D)}
    norms = {"q_norm.g": (K,), "k_norm.g": (K,), "index.q_norm.g": (N,), "index.k_norm.g": (N,)}
    index = {"index.q.w": (D, GROUPS * N), "index.k.w": (D, N)}
    made = {"msa": layer(projections | norms | index, msa_scores, msa_read, norm=True, shared=False)}
    index = {"index.q.w": (D, INDEX_HEADS * N), "index.k.w": (D, N), "index.w.w": (D, INDEX_HEADS)}
    norms = {"index.k_norm.g": (N,), "index.k_norm.b": (N,)}
    made["dsa"] = layer(projections | norms | index, dsa_scores, dsa_read, norm=False, shared=True)
    for name, arrays in made.items():
        path = Path(__file__).parent / f"{name}.npz"
        np.savez_compressed(path, **{key: np.asarray(value, np.float32) for key, value in arrays.items()})


if __name__ == "__main__":
    main()
