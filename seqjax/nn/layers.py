"""The layers that architectures share: projections, norms and MLPs.

Parameters are float32 and are cast to the input dtype on use; norm statistics are always float32.

Autodiff saves the inputs of each elementwise operation's derivative, many of them in float32. This costs more memory
and time than the operations themselves. Norms and the MLP gate therefore have custom gradients, and `save_inputs`
provides one for other elementwise functions.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

import kernels_pallas
from seqjax.nn.initializers import GPT_INIT, Init, constant
from seqjax.nn.params import param
from seqjax.nn.short_conv import Canon, extend, init_cache
from seqjax.sharding import constrain_batch
from seqjax.types import Array

Axes = tuple[str | None, str | None]
CHOICE = "index_choice"  # checkpoint name of `save_choice`
STATISTICS = "norm_statistics"  # checkpoint name of the norm statistics: one or two numbers per token and head


def save_inputs(elements: Callable[..., Any]) -> Callable[..., Any]:
    """Return `elements` with a gradient that saves only inputs and norm statistics.

    The backward pass recomputes everything else. This pays off between matrix products: for elementwise operations, and
    for products so narrow that they cost no more than reading their results. The saved inputs and the gradients are in
    memory anyway, because XLA's fusions end there. So the barriers that prevent merging with the forward pass cost
    nothing.
    """
    return jax.checkpoint(elements, policy=jax.checkpoint_policies.save_only_these_names(STATISTICS))


def save_choice(x: Array) -> Array:
    """Return `x`, the keys or blocks that a mixer selects, marked for rematerialisation.

    Every policy of `config.model.remat` saves a marked array. The backward pass then uses the same choice; a recomputed
    choice could differ where scores nearly tie.
    """
    return checkpoint_name(x, CHOICE)


class Linear(nnx.Module):
    """y = x W (+ b), with W of shape (in, out) and a logical axis name per dimension."""

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
        """Map [..., in] to [..., out]."""
        y = x @ self.w[...].astype(x.dtype)
        return y if self.b is None else y + self.b[...].astype(x.dtype)


def project_float32(linear: Linear, x: Array) -> Array:
    """Project with float32 sums and output, for a following sigmoid or exponential."""
    y = jnp.matmul(x, linear.w[...].astype(x.dtype), preferred_element_type=jnp.float32)
    return y if linear.b is None else y + linear.b[...]


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * g over the last axis, statistics in float32.

    With `heads`, x is [..., H, dim] and each head has separate gains, H * dim in total.
    """

    def __init__(
        self, dim: int, *, eps: float = 1e-5, axis: str | None = "embed", heads: int | None = None, rngs: nnx.Rngs
    ):
        self.eps, self.shape = eps, (dim,) if heads is None else (heads, dim)
        self.g = param(rngs, constant(1.0), (math.prod(self.shape),), (axis,))

    def __call__(self, x: Array) -> Array:
        """Map [..., D] to [..., D]."""
        y: Any = _rms_norm(x, self.g[...].reshape(self.shape), self.eps)
        return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: Array, g: Array, eps: float) -> Array:
    return _rms_norm_forward(x, g, eps)[0]


def _rms_norm_forward(x: Array, g: Array, eps: float) -> tuple[Array, tuple[Array, Array, Array]]:
    x32 = x.astype(jnp.float32)
    scale = checkpoint_name(jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps), STATISTICS)
    return (x32 * scale * g).astype(x.dtype), (x, g, scale)


def _rms_norm_backward(eps: float, saved: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array]:
    del eps
    x, g, scale = saved
    unit, dy32 = x.astype(jnp.float32) * scale, dy.astype(jnp.float32)
    du = dy32 * g
    dx = scale * (du - unit * jnp.mean(du * unit, axis=-1, keepdims=True))
    return dx.astype(x.dtype), jnp.sum(dy32 * unit, axis=tuple(range(x.ndim - g.ndim)))


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


class LayerNorm(nnx.Module):
    """y = (x - mean) / sqrt(var + eps) * g + b over the last axis, float32 stats."""

    def __init__(self, dim: int, *, eps: float = 1e-5, axis: str | None = "embed", rngs: nnx.Rngs):
        self.eps = eps
        self.g = param(rngs, constant(1.0), (dim,), (axis,))
        self.b = param(rngs, constant(0.0), (dim,), (axis,))

    def __call__(self, x: Array) -> Array:
        """Map [..., D] to [..., D]."""
        y: Any = layer_norm(x, self.g[...], self.b[...], self.eps)
        return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Array, g: Array, b: Array, eps: float) -> Array:
    """Return (x - mean) / sqrt(var + eps) * g + b over the last axis, g and b [D]."""
    return _layer_norm_forward(x, g, b, eps)[0]


def _layer_norm_forward(x: Array, g: Array, b: Array, eps: float) -> tuple[Array, tuple[Array, ...]]:
    x32 = x.astype(jnp.float32)
    mean = checkpoint_name(jnp.mean(x32, axis=-1, keepdims=True), STATISTICS)
    x32 = x32 - mean
    scale = checkpoint_name(jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps), STATISTICS)
    return (x32 * scale * g + b).astype(x.dtype), (x, g, mean, scale)


def _layer_norm_backward(eps: float, saved: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array]:
    del eps
    x, g, mean, scale = saved
    unit, dy32 = (x.astype(jnp.float32) - mean) * scale, dy.astype(jnp.float32)
    du = dy32 * g
    # Computed with the second mean in one pass over memory; autodiff's second mean would wait for the first.
    along = jnp.mean(du * unit, axis=-1, keepdims=True)
    dx = scale * (du - jnp.mean(du, axis=-1, keepdims=True) - unit * along)
    leading = tuple(range(x.ndim - 1))
    return dx.astype(x.dtype), jnp.sum(dy32 * unit, axis=leading), jnp.sum(dy32, axis=leading)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def residual_norm(norm: RMSNorm | LayerNorm, x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Return x, the residual stream, and its norm in `dtype`, a branch's input.

    x is [B, T, D] or [B, D]. On Triton one pass over memory computes the norm's gradient and adds it to the stream's
    gradient; XLA takes two passes.
    """
    if x.ndim < 3 or x.shape[1] == 1:  # one token, as in decoding
        return x, constrain_batch(norm(x).astype(dtype))
    bias_D = norm.b[...] if isinstance(norm, LayerNorm) else None
    x, h = kernels_pallas.residual_norm(x, gain_D=norm.g[...], bias_D=bias_D, eps=norm.eps, dtype=dtype)
    return x, constrain_batch(h)


def l2_normalize(x: Array) -> Array:
    """Return x / sqrt(sum x^2 + 1e-6) over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + 1e-6)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def silu(x: Array) -> Array:
    """Return x sigmoid(x); 16-bit inputs are computed in float32."""
    return jax.nn.silu(_wide(x))


def gelu_tanh(x: Array) -> Array:
    """Return GELU in its tanh form; 16-bit inputs are computed in float32."""
    return jax.nn.gelu(_wide(x), approximate=True)


# ln Phi(-a) for 0 <= a <= 7, constant term first, fitted at Chebyshev points; the relative error of Phi(-a) is at most
# 1.5e-5.
LOG_PHI = (-0.6931496, -0.7978917, -0.3180376, -0.03714891, 0.005778093, -0.0006164424, 3.932413e-05, -1.116036e-06)


def gelu(x: Array) -> Array:
    """Return x Phi(x), with Phi the normal CDF.

    16-bit inputs are computed in float32 as max(x, 0) - a Phi(-a), with a = |x| and the exponential of a polynomial for
    Phi(-a). The error, at most 3e-6, is far below the rounding of the 16-bit result. With an exact float32 erf, the
    operation would be compute-bound on a GPU instead of memory-bound.
    """
    if x.dtype.itemsize > 2:
        return jax.nn.gelu(x, approximate=False)
    x = _wide(x)
    positive = x >= 0  # including 0, with a derivative of 1/2
    a = jnp.minimum(jnp.where(positive, x, -x), 7.0)  # above 7, a Phi(-a) is below 1e-11
    log_phi = functools.reduce(lambda sum_, coefficient: sum_ * a + coefficient, reversed(LOG_PHI[:-1]), LOG_PHI[-1])
    return jnp.where(positive, x, 0.0) - a * jnp.exp(log_phi)


class Mlp(nnx.Module):
    """The MLP of a block, gated or plain.

    Gated (GeGLU, SwiGLU): (act(x W_g) * (x W_u)) W_d. Plain (gelu): gelu(x W_u) W_d. With `canon`, x W_g and x W_u each
    pass through a separate convolution over time (Canon-D).
    """

    def __init__(
        self,
        dim: int,
        inner: int,
        *,
        kind: str,
        down_init: Init = GPT_INIT,
        bias: bool = False,
        approximate_gelu: bool = False,
        canon: bool = False,
        rngs: nnx.Rngs,
    ):
        self.activation = silu if kind == "swiglu" else gelu_tanh if approximate_gelu else gelu
        gated = kind in ("geglu", "swiglu")
        self.gate = Linear(dim, inner, axes=("embed", "mlp"), bias=bias, rngs=rngs) if gated else None
        self.up = Linear(dim, inner, axes=("embed", "mlp"), bias=bias, rngs=rngs)
        self.down = Linear(inner, dim, axes=("mlp", "embed"), bias=bias, init=down_init, rngs=rngs)
        self.up_conv = Canon(inner, axis="mlp", rngs=rngs) if canon else None
        self.gate_conv = Canon(inner, axis="mlp", rngs=rngs) if canon and gated else None

    def __call__(self, x: Array) -> Array:
        """Map [..., D] to [..., D]; with `canon`, [B, T, D]."""
        return self.extend(x, (None, None))[0]

    def extend(self, x: Array, last: tuple[Any, Any], segments: Array | None = None) -> tuple[Array, tuple[Any, Any]]:
        """Map tokens that continue a sequence, [B, T, D] or one token [B, D].

        Returns the outputs and the last convolution inputs, which the next call receives as `last`. `segments` are the
        numbers of the tokens' documents, as in `ShortConv`.
        """
        up, last_up = extend(self.up_conv, self.up(x), last[0], segments)
        if self.gate is None:
            hidden = save_inputs(lambda up: self.activation(up).astype(up.dtype))(up)
            return self.down(hidden), (last_up, None)
        gate, last_gate = extend(self.gate_conv, self.gate(x), last[1], segments)
        hidden: Any = _gated(gate, up, self.activation)
        return self.down(hidden), (last_up, last_gate)

    def init_cache(self, batch: int, dtype: Any) -> tuple[Any, Any]:
        """Return an empty `last` for `extend`."""
        return init_cache(self.up_conv, batch, dtype), init_cache(self.gate_conv, batch, dtype)


# The custom gradient saves only the two inputs; autodiff would also save the activation and its derivative.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gated(gate: Array, up: Array, activation: Any) -> Array:
    return (activation(gate) * up).astype(up.dtype)


def _gated_forward(gate: Array, up: Array, activation: Any) -> tuple[Array, tuple[Array, Array]]:
    return _gated(gate, up, activation), (gate, up)


def _gated_backward(activation: Any, saved: tuple[Array, Array], dh: Array) -> tuple[Array, Array]:
    # The barrier reduces a 110M Transformer++ step on a GPU from 14.4 to 11.4 GiB.
    gate, up, dh = jax.lax.optimization_barrier((*saved, dh))
    active, pull = jax.vjp(activation, gate)
    dh = dh.astype(active.dtype)
    return pull(dh * up)[0], (dh * active).astype(up.dtype)


_gated.defvjp(_gated_forward, _gated_backward)
