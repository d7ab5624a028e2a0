"""Norms and MLPs against their equations in float64, and the values saved for gradients."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax.nn import LayerNorm, Linear, Mlp, RMSNorm, l2_normalize, save_inputs
from seqjax.nn.layers import gelu, layer_norm
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
    """The mean is a hundred times the deviation, so bfloat16 statistics would fail."""
    norm = fill(LayerNorm(24, eps=1e-3, rngs=nnx.Rngs(0)))
    x = jnp.asarray(rng.standard_normal((3, 5, 24)) + 100, dtype)
    x64 = np.asarray(x, np.float64)
    centred = x64 - x64.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * value(norm.g) + value(norm.b)
    tolerance = 1e-4 if dtype == jnp.float32 else 2**-6
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), want, rtol=tolerance, atol=tolerance)


def layer_norm_by_autodiff(x, g, b):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * g + b


def test_layer_norm_gradient_equals_autodiff():
    weight = rng.standard_normal((3, 4, 24))
    inputs = [rng.standard_normal(shape) + shift for shape, shift in (((3, 4, 24), 5), (24, 1), (24, 0))]
    with jax.enable_x64(True):
        loss = lambda *inputs: jnp.sum(layer_norm_by_autodiff(*inputs) * weight)  # noqa: E731
        want = jax.grad(loss, (0, 1, 2))(*(jnp.asarray(x) for x in inputs))
    loss = lambda *inputs: jnp.sum(layer_norm(*inputs, 1e-3) * weight)  # noqa: E731
    got = jax.grad(loss, (0, 1, 2))(*(jnp.asarray(x, jnp.float32) for x in inputs))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # sums over up to 288 numbers of order 1, in float32


def gated_norm(x, g, b, gate, w):
    return (layer_norm(jnp.exp(x.astype(jnp.float32)), g, b, 1e-3) * jnp.tanh(gate @ w)).astype(x.dtype)


def test_save_inputs_saves_inputs_and_statistics():
    """The inputs are bfloat16, intermediate values float32."""
    shapes = [(3, 5, 24), (24,), (24,), (3, 5, 2), (2, 24)]
    inputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    saved = {
        fn: [x.shape for x in jax.tree.leaves(jax.eval_shape(lambda *x, fn=fn: jax.vjp(fn, *x)[1], *inputs))]
        for fn in (gated_norm, save_inputs(gated_norm))
    }
    by_autodiff, by_save_inputs = saved.values()
    assert by_autodiff.count((3, 5, 24)) > 3
    statistics = (3, 5, 1)
    assert sorted(by_save_inputs) == sorted([*shapes, statistics, statistics])


def test_save_inputs_keeps_gradients():
    with jax.enable_x64(True):
        inputs = [jnp.asarray(rng.standard_normal(shape)) for shape in ((3, 5, 24), (24,), (24,), (3, 5, 2), (2, 24))]
        want, got = (
            jax.grad(lambda *x, fn=fn: jnp.sum(fn(*x) ** 3), (0, 1, 2, 3, 4))(*inputs)
            for fn in (gated_norm, save_inputs(gated_norm))
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), got, want)


def test_recomputation_is_not_merged_with_the_first_computation():
    """In a compiled program. Without the barrier, XLA would keep the first results."""
    elements = lambda gate, x: jnp.tanh(gate) * x  # noqa: E731

    def count_tanh(elements):
        loss = lambda w, x: jnp.sum(elements(x @ w, x))  # noqa: E731
        w, x = jnp.ones((8, 8)), jnp.ones((3, 8))
        program: Any = jax.jit(jax.value_and_grad(loss)).lower(w, x).compile().as_text()
        return program.count(" tanh(")

    assert [count_tanh(elements), count_tanh(save_inputs(elements))] == [1, 2]


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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_gelu_for_all_16_bit_numbers(dtype):
    """Float32 values, and derivatives rounded to 16 bits."""
    x = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), dtype)
    x = x[jnp.isfinite(x)]
    value, pull = jax.vjp(gelu, x)
    assert value.dtype == jnp.float32
    x64 = np.asarray(x, np.float64)
    phi = np.array([0.5 * math.erfc(-number / math.sqrt(2)) for number in x64])
    np.testing.assert_allclose(value, x64 * phi, rtol=1e-7, atol=3e-6)
    (slope,) = pull(jnp.ones_like(value))
    with np.errstate(over="ignore"):
        want = phi + x64 * np.exp(-(x64**2) / 2) / math.sqrt(2 * math.pi)
    rounding = {jnp.bfloat16: 2**-8, jnp.float16: 2**-11}[dtype]
    np.testing.assert_allclose(np.asarray(slope, np.float64), want, rtol=rounding, atol=2e-5)


def test_linear_weights_and_optional_bias():
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
