"""Norms and MLPs against the same equations in float64 numpy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax.nn import LayerNorm, Linear, Mlp, RMSNorm, l2_normalize
from tests.nn.common import fill, rng, value


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_l2_normalize(dtype):
    x = jnp.asarray(1e-3 * rng.standard_normal((3, 8)), dtype)
    x64 = np.asarray(x, np.float64)
    got = l2_normalize(x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, x64 / np.sqrt((x64**2).sum(-1, keepdims=True) + 1e-6), rtol=1e-6)
