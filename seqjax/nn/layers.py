"""Layers that the mixers share: projections, norms, MLPs, rotary positions.

Parameters are float32 and are cast to the dtype of the input where they are used; norm statistics and rotary angles
are float32 whatever the input is (the "fp32 islands").
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.nn.params import Init, param
from seqjax.types import Array

Axes = tuple[str | None, str | None]


def normal(std: float) -> Init:
    """Initialiser N(0, std^2)."""
    return lambda key, shape, dtype: std * jax.random.normal(key, shape, dtype)


def uniform(bound: float) -> Init:
    """Initialiser U(-bound, bound)."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def constant(value: float) -> Init:
    """Initialiser with one value everywhere."""
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


GPT_INIT = normal(0.02)


def residual_init(n_layers: int) -> Init:
    """GPT init of the two matrices per layer that write to the residual stream: N(0, (0.02 / sqrt(2 L))^2)."""
    return normal(0.02 / math.sqrt(2 * n_layers))


class Linear(nnx.Module):
    """y = x W (+ b), W of shape (in, out), with logical axis names for both dimensions."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        axes: Axes,
        bias: bool = False,
        init: Init = GPT_INIT,
        rngs: nnx.Rngs,
    ):
        self.w = param(rngs, init, (n_in, n_out), axes)
        self.b = param(rngs, constant(0.0), (n_out,), axes[1:]) if bias else None

    def __call__(self, x: Array) -> Array:
        """[..., in] -> [..., out]."""
        y = x @ self.w[...].astype(x.dtype)
        return y if self.b is None else y + self.b[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * g over the last axis, statistics in float32."""

    def __init__(self, dim: int, *, eps: float = 1e-5, axis: str | None = "embed", rngs: nnx.Rngs):
        self.eps = eps
        self.g = param(rngs, constant(1.0), (dim,), (axis,))

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]."""
        y: Any = _rms_norm(x, self.g[...], self.eps)
        return y


# With its own gradient because autodiff keeps float32 copies of x, which cost more than the norm itself.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: Array, g_D: Array, eps: float) -> Array:
    return _rms_norm_forward(x, g_D, eps)[0]


def _rms_norm_forward(x: Array, g_D: Array, eps: float) -> tuple[Array, tuple[Array, Array, Array]]:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * g_D).astype(x.dtype), (x, g_D, scale)


def _rms_norm_backward(eps: float, saved: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array]:
    del eps
    x, g_D, scale = saved
    unit, dy32 = x.astype(jnp.float32) * scale, dy.astype(jnp.float32)
    du = dy32 * g_D
    dx = scale * (du - unit * jnp.mean(du * unit, axis=-1, keepdims=True))
    return dx.astype(x.dtype), jnp.sum(dy32 * unit, axis=tuple(range(x.ndim - 1)))


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


class LayerNorm(nnx.Module):
    """y = (x - mean) / sqrt(var + eps) * g + b over the last axis, statistics in float32."""

    def __init__(self, dim: int, *, eps: float = 1e-5, axis: str | None = "embed", rngs: nnx.Rngs):
        self.eps = eps
        self.g = param(rngs, constant(1.0), (dim,), (axis,))
        self.b = param(rngs, constant(0.0), (dim,), (axis,))

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * scale * self.g[...] + self.b[...]).astype(x.dtype)


NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


class Mlp(nnx.Module):
    """Gated (GeGLU, SwiGLU): (act(x W_g) * (x W_u)) W_d. Plain (gelu): gelu(x W_u) W_d."""

    def __init__(
        self,
        dim: int,
        inner: int,
        *,
        kind: str,
        down_init: Init = GPT_INIT,
        bias: bool = False,
        approximate_gelu: bool = False,
        rngs: nnx.Rngs,
    ):
        self.activation = (
            jax.nn.silu if kind == "swiglu" else functools.partial(jax.nn.gelu, approximate=approximate_gelu)
        )
        gated = kind in ("geglu", "swiglu")
        self.gate = Linear(dim, inner, axes=("embed", "mlp"), bias=bias, rngs=rngs) if gated else None
        self.up = Linear(dim, inner, axes=("embed", "mlp"), bias=bias, rngs=rngs)
        self.down = Linear(inner, dim, axes=("mlp", "embed"), bias=bias, init=down_init, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]."""
        up = self.up(x)
        if self.gate is None:
            return self.down(self.activation(up))
        hidden: Any = _gated(self.gate(x), up, self.activation)
        return self.down(hidden)


# With its own gradient because autodiff keeps the activation and its derivative beside the two inputs.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gated(gate: Array, up: Array, activation: Any) -> Array:
    return (activation(gate.astype(jnp.promote_types(gate.dtype, jnp.float32))) * up).astype(up.dtype)


def _gated_forward(gate: Array, up: Array, activation: Any) -> tuple[Array, tuple[Array, Array]]:
    return _gated(gate, up, activation), (gate, up)


def _gated_backward(activation: Any, saved: tuple[Array, Array], dh: Array) -> tuple[Array, Array]:
    gate, up = saved
    active, pull = jax.vjp(activation, gate.astype(jnp.promote_types(gate.dtype, jnp.float32)))
    dh = dh.astype(active.dtype)
    return pull(dh * up)[0].astype(gate.dtype), (dh * active).astype(up.dtype)


_gated.defvjp(_gated_forward, _gated_backward)


class ShortConv(nnx.Module):
    """Depthwise causal convolution: y_t = act(sum_i w_i x_{t - W + 1 + i} + b); the last of W taps is the token itself.

    Taps and bias start U(+-1 / sqrt(W)) unless `init` says otherwise (torch's Conv1d). `silu` is the activation.
    """

    def __init__(
        self,
        dim: int,
        *,
        width: int = 4,
        bias: bool = False,
        silu: bool = True,
        init: Init | None = None,
        axis: str | None = "mlp",
        rngs: nnx.Rngs,
    ):
        init = init or uniform(width**-0.5)
        self.silu = silu
        self.w = param(rngs, init, (dim, width), (axis, "conv"))
        self.b = param(rngs, init, (dim,), (axis,)) if bias else None

    def __call__(self, x_BTE: Array, last_BWE: Array | None = None) -> Array:
        """[B, T, E] -> [B, T, E]; `last_BWE` (default zero) holds the W - 1 inputs before the first."""
        n_past = self.w.shape[1] - 1
        if last_BWE is None:
            x_BSE = jnp.pad(x_BTE, ((0, 0), (n_past, 0), (0, 0)))
        else:
            x_BSE = jnp.concatenate([last_BWE.astype(x_BTE.dtype), x_BTE], axis=1)
        bias = None if self.b is None else self.b[...]
        return _conv_act(x_BSE, self.w[...], bias, self.silu)

    def init_cache(self, batch: int, dtype: Any) -> Array:
        """Zeros [B, W - 1, E]: no input yet."""
        return jnp.zeros((batch, self.w.shape[1] - 1, self.w.shape[0]), dtype)

    def extend(self, x_BTE: Array, last_BWE: Array) -> tuple[Array, Array]:
        """The convolution after `last_BWE`, and the W - 1 inputs before whatever follows."""
        seen = jnp.concatenate([last_BWE, x_BTE.astype(last_BWE.dtype)], axis=1)
        return self(x_BTE, last_BWE), seen[:, x_BTE.shape[1] :]


# With its own gradient because autodiff would keep W shifted float32 copies of the input, or compute them all again.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _conv_act(x_BSE: Array, w_EW: Array, b_E: Array | None, silu: bool) -> Array:
    z = _conv(x_BSE, w_EW, b_E)
    return (jax.nn.silu(z) if silu else z).astype(x_BSE.dtype)


def _conv(x_BSE: Array, w_EW: Array, b_E: Array | None) -> Array:
    width = w_EW.shape[1]
    x32, n_out = x_BSE.astype(jnp.float32), x_BSE.shape[1] - width + 1
    z: Any = sum(x32[:, i : i + n_out] * w_EW[:, i] for i in range(width))
    return z if b_E is None else z + b_E


def _conv_act_forward(x_BSE: Array, w_EW: Array, b_E: Array | None, silu: bool):
    return _conv_act(x_BSE, w_EW, b_E, silu), (x_BSE, w_EW, b_E)


def _conv_act_backward(silu: bool, saved: tuple[Array, Array, Array | None], dy: Array):
    x_BSE, w_EW, b_E = saved
    width, n_out = w_EW.shape[1], dy.shape[1]
    dz = dy
    if silu:
        dz = jax.vjp(jax.nn.silu, _conv(x_BSE, w_EW, b_E))[1](dy.astype(jnp.float32))[0].astype(dy.dtype)
        # Made once: XLA would make it again for each of the taps below.
        dz = jax.lax.optimization_barrier(dz)
    padded = jnp.pad(dz, ((0, 0), (width - 1, width - 1), (0, 0))).astype(jnp.float32)
    taps = range(width)
    dx: Any = sum(padded[:, width - 1 - i : width - 1 - i + x_BSE.shape[1]] * w_EW[:, i] for i in taps)
    dz32, x32 = dz.astype(jnp.float32), x_BSE.astype(jnp.float32)
    dw = jnp.stack([jnp.sum(dz32 * x32[:, i : i + n_out], axis=(0, 1)) for i in taps], axis=1)
    return dx.astype(x_BSE.dtype), dw, None if b_E is None else jnp.sum(dz32, axis=(0, 1))


_conv_act.defvjp(_conv_act_forward, _conv_act_backward)
