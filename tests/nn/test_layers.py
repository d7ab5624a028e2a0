"""Layers against the same equations in float64 numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax.nn import LayerNorm, Linear, Mlp, RMSNorm, ShortConv
from seqjax.ops.attention import attention_entropy, attention_step, causal_attention
from seqjax.ops.positions import alibi_slopes, rope, rope_angles

rng = np.random.default_rng(0)


def fill(module):
    """Random values in every parameter, so that a gain or bias that is ignored shows."""
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable[...] = jnp.asarray(rng.standard_normal(variable[...].shape, np.float32))
    return module


def value(variable):
    return np.asarray(variable[...], np.float64)


# ----------------------------------------------------------------------------------------------------- positions
@pytest.mark.parametrize("base", [1e4, 1e6])
@pytest.mark.parametrize("max_len", [1, 2, 2048, 102_400, 2**20])
def test_rope_angles_hold_at_every_position(base, max_len):
    """Float32 alone is off by 6e-3 rad at 100k; two tables of float64 and one product must not be."""
    picked = np.unique(np.concatenate([np.arange(min(max_len, 300)), rng.integers(0, max_len, 500), [max_len - 1]]))
    cos, sin = rope_angles(jnp.asarray(picked), head_dim=64, base=base, max_len=max_len)
    angles = picked[:, None] * base ** (-np.arange(0, 64, 2) / 64)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=4e-7)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=4e-7)


def test_rope_rotates_halves_and_scores_depend_on_distance():
    x_BTHK = rng.standard_normal((1, 50, 2, 8), np.float32)
    cos, sin = rope_angles(jnp.arange(50), head_dim=8, base=1e4, max_len=50)
    got = np.asarray(rope(jnp.asarray(x_BTHK), cos, sin), np.float64)
    z = (x_BTHK[..., :4] + 1j * x_BTHK[..., 4:]) * np.exp(1j * np.arange(50)[:, None] * 1e4 ** (-np.arange(4) / 4))[
        :, None
    ]
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), atol=1e-5)
    # one vector everywhere: q . k is a function of i - j alone
    same = np.asarray(rope(jnp.broadcast_to(jnp.asarray(x_BTHK[:, :1]), x_BTHK.shape), cos, sin))[0, :, 0]
    scores = same @ same.T
    np.testing.assert_allclose(scores[5:, 5:], scores[:-5, :-5], atol=1e-4)
    assert not np.allclose(scores[0, 1], scores[0, 2], atol=1e-3)


def test_rope_keeps_the_dtype_and_computes_in_float32():
    cos, sin = rope_angles(jnp.asarray([100_000]), head_dim=8, base=1e4, max_len=102_400)
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    out = rope(x, cos, sin)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out[0, 0, 0, :4], np.float64), np.asarray(cos - sin)[0], atol=2**-8)


# ------------------------------------------------------------------------------------------------ norms and MLPs
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rmsnorm(dtype):
    norm = fill(RMSNorm(24, eps=1e-3, rngs=nnx.Rngs(0)))
    x = jnp.asarray(30 * rng.standard_normal((3, 5, 24)) + 100, dtype)
    x64 = np.asarray(x, np.float64)
    want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-3) * value(norm.g)
    assert norm(x).dtype == dtype
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), want, rtol=1e-5 if dtype == jnp.float32 else 2**-8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layernorm(dtype):
    """A mean a hundred times the spread: statistics of bfloat16 would leave nothing."""
    norm = fill(LayerNorm(24, eps=1e-3, rngs=nnx.Rngs(0)))
    x = jnp.asarray(rng.standard_normal((3, 5, 24)) + 100, dtype)
    x64 = np.asarray(x, np.float64)
    centred = x64 - x64.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * value(norm.g) + value(norm.b)
    tolerance = 1e-4 if dtype == jnp.float32 else 2**-6
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), want, rtol=tolerance, atol=tolerance)


erf = np.vectorize(math.erf)
ACTIVATIONS = {
    ("geglu", False): lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    ("geglu", True): lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ("swiglu", False): lambda x: x / (1 + np.exp(-x)),
    ("gelu", False): lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
}


@pytest.mark.parametrize(("kind", "approximate"), ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(kind, approximate, bias):
    mlp = fill(Mlp(6, 10, kind=kind, bias=bias, approximate_gelu=approximate, rngs=nnx.Rngs(0)))
    x = rng.standard_normal((4, 6), np.float32)

    def linear(layer, x):
        return x @ value(layer.w) + (value(layer.b) if bias else 0)

    hidden = linear(mlp.up, x.astype(np.float64))
    if kind == "gelu":
        assert mlp.gate is None
        hidden = ACTIVATIONS[kind, approximate](hidden)
    else:
        hidden = ACTIVATIONS[kind, approximate](linear(mlp.gate, x.astype(np.float64))) * hidden
    np.testing.assert_allclose(mlp(jnp.asarray(x)), linear(mlp.down, hidden), rtol=1e-4, atol=1e-4)


def test_linear_has_weights_in_out_and_a_bias_on_demand():
    layer = fill(Linear(3, 5, axes=("embed", "mlp"), bias=True, rngs=nnx.Rngs(0)))
    x = rng.standard_normal((2, 3), np.float32)
    np.testing.assert_allclose(layer(jnp.asarray(x)), x @ value(layer.w) + value(layer.b), rtol=1e-5, atol=1e-5)
    assert Linear(3, 5, axes=("embed", "mlp"), rngs=nnx.Rngs(0)).b is None


# ----------------------------------------------------------------------------------------------------- attention
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
    if not window:
        step = attention_step(args[0][:, -1], args[1], args[2], jnp.asarray(13), scale=1.5, slopes=slopes)
        np.testing.assert_allclose(step, want[:, -1], rtol=1e-4, atol=1e-5)
    entropy = attention_entropy(*args[:2], window=window, scale=1.5, slopes=slopes, block=4)
    dense = -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)
    np.testing.assert_allclose(entropy, np.moveaxis(dense, 1, 2), atol=1e-5)


def test_alibi_slopes():
    """Those of the public code for 12 heads: the powers of two for 8, then every second one of those for 16."""
    want = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n + 0.5) for n in range(4)]
    np.testing.assert_allclose(alibi_slopes(12), want)


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


# ------------------------------------------------------------------------------------------------------ convolution
@pytest.mark.parametrize(
    ("width", "bias", "silu"), [(4, True, True), (3, False, True), (4, False, False), (1, True, False)]
)
def test_short_conv_and_its_cache(width, bias, silu):
    conv = fill(ShortConv(6, width=width, bias=bias, silu=silu, rngs=nnx.Rngs(0)))
    x = rng.standard_normal((2, 9, 6), np.float32)
    padded = np.concatenate([np.zeros((2, width - 1, 6)), x], axis=1)
    want = sum(padded[:, i : i + 9] * value(conv.w)[:, i] for i in range(width)) + (value(conv.b) if bias else 0)
    want = want / (1 + np.exp(-want)) if silu else want
    np.testing.assert_allclose(conv(jnp.asarray(x)), want, rtol=1e-5, atol=1e-5)
    # in pieces, of which some are shorter than the filter
    cache, parts = conv.init_cache(2, jnp.float32), []
    for piece in np.split(x, [1, 3, 8], axis=1):
        part, cache = conv.extend(jnp.asarray(piece), cache)
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), want, rtol=1e-5, atol=1e-5)
    assert cache.shape == (2, width - 1, 6)
