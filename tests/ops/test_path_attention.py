"""Chunked PaTH attention against its definition: each key is multiplied by the matrices of all later tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.ops import path_attention as ops

path_attention, path_keys = (jax.jit(f, static_argnames="chunk_size") for f in (ops.path_attention, ops.path_keys))


def inputs(seq_len, *, heads=4, kv_heads=2, width=6, gates=True, seed=0):
    """Draw q, k, v, w, beta and log f; token 1 has beta 0 (no change), token 2 has beta 2 (a reflection)."""
    rng = np.random.default_rng(seed)
    q, k, v, w = (rng.normal(size=(2, seq_len, n, width)) for n in (heads, kv_heads, kv_heads, kv_heads))
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    beta = rng.uniform(0, 2, size=(2, seq_len, kv_heads))
    beta[:, 1:2], beta[:, 2:3] = 0, 2
    log_f = np.log(rng.uniform(0.3, 1, size=(2, seq_len, heads))) if gates else None
    return q, k, v, w, beta, log_f


def transformed_keys(k, w, beta):
    """Return the keys after each token, [T, B, T, G, K]; later keys are zero."""
    keys, out = np.zeros_like(k), []
    for t in range(k.shape[1]):
        past = (keys * w[:, t, None]).sum(-1, keepdims=True)
        keys = keys - beta[:, t, None, :, None] * past * w[:, t, None]
        keys[:, t] = k[:, t]
        out.append(keys)
    return np.array(out)


def definition(q, k, v, w, beta, log_f):
    repeats = q.shape[2] // k.shape[2]
    keys, v = np.repeat(transformed_keys(k, w, beta), repeats, 3), np.repeat(v, repeats, 2)
    c = np.zeros(q.shape[:3]) if log_f is None else np.cumsum(log_f, axis=1)
    o = np.zeros_like(q)
    for i in range(q.shape[1]):
        s = np.einsum("bhk,bjhk->bjh", q[:, i], keys[i][:, : i + 1]) * q.shape[-1] ** -0.5
        s = s + c[:, i, None] - c[:, : i + 1]
        p = np.exp(s - s.max(1, keepdims=True))
        o[:, i] = np.einsum("bjh,bjhk->bhk", p / p.sum(1, keepdims=True), v[:, : i + 1])
    return o


@pytest.mark.parametrize(
    ("seq_len", "chunk_size", "options"),
    [(13, 4, {}), (16, 8, {"gates": False}), (5, 64, {"kv_heads": 4}), (1, 4, {}), (21, 1, {})],
)
def test_equals_the_definition(seq_len, chunk_size, options):
    arrays = inputs(seq_len, **options)
    got = path_attention(*(None if x is None else jnp.float32(x) for x in arrays), chunk_size=chunk_size)
    np.testing.assert_allclose(got, definition(*arrays), rtol=2e-5, atol=2e-5)


def test_chunked_gradient_equals_one_chunk():
    arrays = [jnp.float32(x) for x in inputs(13)]

    def gradient(chunk_size):
        def loss(*arrays):
            return jnp.sum(jnp.sin(path_attention(*arrays, chunk_size=chunk_size)))

        return jax.jit(jax.grad(loss, argnums=range(6)))(*arrays)

    for got, want in zip(gradient(4), gradient(13), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


def test_gradient_equals_finite_differences():
    arrays, rng = inputs(7), np.random.default_rng(1)
    weight = rng.normal(size=arrays[0].shape)
    directions = [rng.normal(size=x.shape) for x in arrays]

    def loss(*arrays):
        return jnp.sum(path_attention(*arrays, chunk_size=4) * weight)

    gradients = jax.jit(jax.grad(loss, argnums=range(6)))(*map(jnp.float32, arrays))
    for i, direction in enumerate(directions):
        moved = [[x + (step * direction if j == i else 0) for j, x in enumerate(arrays)] for step in (1e-5, -1e-5)]
        up, down = (np.sum(definition(*x) * weight) for x in moved)
        assert np.sum(gradients[i] * direction) == pytest.approx((up - down) / 2e-5, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(("n_old", "n_new"), [(0, 9), (6, 5), (10, 1)])
def test_cached_keys_are_updated_by_new_tokens(n_old, n_new):
    _, k, _, w, beta, _ = inputs(n_old + n_new)
    want = transformed_keys(k, w, beta)
    old = np.zeros((2, 12, 2, 6))  # more slots than keys
    if n_old:
        old[:, :n_old] = want[n_old - 1][:, :n_old]
    more = [jnp.float32(x[:, n_old:]) for x in (k, w, beta)]
    got_old, got_new = path_keys(jnp.float32(old), *more, chunk_size=4)
    np.testing.assert_allclose(got_old[:, :n_old], want[-1][:, :n_old], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got_new, want[-1][:, n_old:], rtol=2e-5, atol=2e-5)
    assert not np.any(got_old[:, n_old:])


def test_bfloat16_stays_near_float64():
    arrays = inputs(13)
    bf16 = [jnp.asarray(x, jnp.bfloat16 if i < 3 else jnp.float32) for i, x in enumerate(arrays)]
    got = path_attention(*bf16, chunk_size=4)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(got), definition(*arrays), atol=0.05)
