"""Softmax attention, its step over a cache and its entropy, against the same equations in float64 numpy."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.ops import attention
from seqjax.ops.attention import attention_at, attention_entropy, attention_step, causal_attention

rng = np.random.default_rng(0)


def dense_attention(q, k, v, window):
    """Softmax attention with an explicit mask, one KV head for each group of query heads, float64."""
    n_heads, length = q.shape[2], q.shape[1]
    k, v = (np.repeat(np.asarray(x, np.float64), n_heads // k.shape[2], axis=2) for x in (k, v))
    s = np.einsum("bthk,bshk->bhts", np.asarray(q, np.float64), k) / np.sqrt(q.shape[-1])
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    seen = (j <= i) & (i - j < (window or length))
    p = np.exp(s - s.max(-1, keepdims=True)) * seen
    return np.einsum("bhts,bshk->bthk", p / p.sum(-1, keepdims=True), v), seen


@pytest.mark.parametrize("window", [0, 1, 2, 5, 13, 40])
@pytest.mark.parametrize("n_kv", [1, 2, 4])
def test_attention_and_its_step(window, n_kv):
    """`window` counts the query's own position: of W = 1 only itself is left."""
    q = rng.standard_normal((2, 13, 4, 8), np.float32)
    k, v = (rng.standard_normal((2, 13, n_kv, 8), np.float32) for _ in range(2))
    want, seen = dense_attention(q, k, v, window)
    assert (seen.sum(-1) == np.minimum(np.arange(13) + 1, window or 13)).all()
    got = causal_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), window=window)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    # the last query over a cache of what it sees, in another order, with garbage behind
    keys = np.flatnonzero(seen[-1])[::-1]
    garbage = np.full((2, 3, n_kv, 8), 1e3, np.float32)
    cache = [jnp.asarray(np.concatenate([x[:, keys], garbage], axis=1)) for x in (k, v)]
    step = attention_step(jnp.asarray(q[:, -1]), *cache, jnp.asarray(len(keys)))
    np.testing.assert_allclose(step, want[:, -1], rtol=1e-4, atol=1e-5)
    # the last queries over all keys, in another order, at positions from 100 on; garbage is at negative ones
    order = rng.permutation(13)
    cache = [jnp.asarray(np.concatenate([x[:, order], garbage], axis=1)) for x in (k, v)]
    positions_S = jnp.asarray([*(100 + order), -1, -2, -300])
    piece = attention_at(jnp.asarray(q[:, 4:]), *cache, 100 + jnp.arange(4, 13), positions_S, window=window)
    np.testing.assert_allclose(piece, want[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "slopes"), [(0, ()), (5, ()), (0, (0.5, 0.25, 2.0, 1.0)), (5, (0.5, 0.25, 2.0, 1.0))]
)
def test_alibi_and_the_entropy_of_the_weights(window, slopes):
    """Against the dense definition in float64; blocks of 4 keys, which the 13 positions are not a multiple of."""
    q, k, v = (rng.standard_normal((2, 13, n, 8), np.float32) for n in (4, 2, 2))
    i, j = np.arange(13)[:, None], np.arange(13)[None]
    k64, v64 = (np.repeat(np.asarray(x, np.float64), 2, axis=2) for x in (k, v))
    s = 1.5 * np.einsum("bthk,bshk->bhts", q, k64) - np.asarray(slopes or (0.0,) * 4)[:, None, None] * (i - j)
    p = np.exp(s - s.max(-1, keepdims=True)) * ((j <= i) & (i - j < (window or 13)))
    p /= p.sum(-1, keepdims=True)
    args = [jnp.asarray(x) for x in (q, k, v)]
    got = causal_attention(*args, window=window, scale=1.5, slopes=slopes)
    want = np.einsum("bhts,bshk->bthk", p, v64)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    positions = jnp.arange(13)
    piece = attention_at(*args, positions, positions, window=window, scale=1.5, slopes=slopes)
    np.testing.assert_allclose(piece, want, rtol=1e-4, atol=1e-5)
    if not window:
        step = attention_step(args[0][:, -1], args[1], args[2], jnp.asarray(13), scale=1.5, slopes=slopes)
        np.testing.assert_allclose(step, want[:, -1], rtol=1e-4, atol=1e-5)
    entropy = attention_entropy(*args[:2], window=window, scale=1.5, slopes=slopes, block=4)
    dense = -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)
    np.testing.assert_allclose(entropy, np.moveaxis(dense, 1, 2), atol=1e-5)


def test_attention_takes_a_scale():
    q, k, v = (jnp.asarray(rng.standard_normal((1, 6, 2, 4), np.float32)) for _ in range(3))
    np.testing.assert_allclose(
        causal_attention(q, k, v, scale=1.5), causal_attention(3 * q, k, v, scale=0.5), atol=1e-5
    )
    step = attention_step(q[:, -1], k, v, jnp.asarray(6), scale=1.5)
    np.testing.assert_allclose(step, causal_attention(q, k, v, scale=1.5)[:, -1], atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="cuDNN may serve this on a GPU")
def test_a_named_implementation_that_cannot_run_is_an_error():
    q = jnp.ones((1, 6, 2, 4), jnp.bfloat16)
    with pytest.raises(RuntimeError, match="cuDNN"):
        causal_attention(q, q, q, implementation="cudnn")


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "serves"),
    [
        ("NVIDIA A100-SXM4-40GB", "8.0", jnp.bfloat16, True),
        ("NVIDIA H200", "9.0", jnp.float16, True),
        ("NVIDIA H200", "9.0", jnp.float32, False),
        ("NVIDIA B200", "10.0", jnp.bfloat16, True),
        ("NVIDIA GeForce RTX 2080 Ti", "7.5", jnp.bfloat16, False),
        ("Tesla T4", "7.5", jnp.bfloat16, False),
    ],
)
def test_cudnn_serves_16_bits_since_the_a100(monkeypatch, kind, capability, dtype, serves):
    q = jnp.zeros((1, 8, 2, 64), dtype)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert attention._cudnn_serves(q) is serves
