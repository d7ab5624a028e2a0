"""The `xla` backend of the short convolution: array code for any device.

Convolution and SiLU have a custom VJP, because autodiff would keep or recompute W shifted float32 copies of the input.
Their result is rounded to the input dtype before the norm, which JAX differentiates.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.segments import keep
from kernels_pallas.short_conv.interface import ShortConv


def load() -> ShortConv:
    """Return this module."""
    from kernels_pallas.short_conv import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    x_BTE: Array,
    w_EW: Array,
    b_E: Array | None,
    last_BWE: Array | None,
    reach_BT: Array | None = None,
    *,
    silu: bool,
    l2_heads: int | None,
    scale: float,
    eps: float,
) -> Array:
    """Return y_BTE."""
    if last_BWE is None:
        x_BSE = jnp.pad(x_BTE, ((0, 0), (w_EW.shape[1] - 1, 0), (0, 0)))
    else:
        x_BSE = jnp.concatenate([last_BWE, x_BTE], axis=1)
    s_BTE: Any = _conv_act(x_BSE, w_EW, b_E, reach_BT, silu)
    if l2_heads is None:
        return s_BTE
    s_BTHK = s_BTE.reshape(*s_BTE.shape[:2], l2_heads, -1).astype(w_EW.dtype)
    unit_BTHK = s_BTHK * jax.lax.rsqrt(jnp.sum(s_BTHK * s_BTHK, axis=-1, keepdims=True) + eps)
    return (unit_BTHK * scale).astype(x_BTE.dtype).reshape(x_BTE.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _conv_act(x_BSE: Array, w_EW: Array, b_E: Array | None, reach_BT: Array | None, silu: bool) -> Array:
    z = _conv(x_BSE, w_EW, b_E, reach_BT)
    return (jax.nn.silu(z) if silu else z).astype(x_BSE.dtype)


def _conv(x_BSE: Array, w_EW: Array, b_E: Array | None, reach_BT: Array | None) -> Array:
    width = w_EW.shape[1]
    x, n_out = x_BSE.astype(w_EW.dtype), x_BSE.shape[1] - width + 1
    z: Any = sum(_within(x[:, i : i + n_out], reach_BT, width - 1 - i) * w_EW[:, i] for i in range(width))
    return z if b_E is None else z + b_E


def _within(x_BTE: Array, reach_BT: Array | None, back: int) -> Array:
    """Return x where a token reads the input `back` tokens before it, else 0."""
    return x_BTE if reach_BT is None else keep(reach_BT >= back, x_BTE)


def _conv_act_forward(x_BSE: Array, w_EW: Array, b_E: Array | None, reach_BT: Array | None, silu: bool):
    return _conv_act(x_BSE, w_EW, b_E, reach_BT, silu), (x_BSE, w_EW, b_E, reach_BT)


def _conv_act_backward(silu: bool, saved: tuple[Array, Array, Array | None, Array | None], dy: Array):
    x_BSE, w_EW, b_E, reach_BT = saved
    (width, acc), n_out = (w_EW.shape[1], w_EW.dtype), dy.shape[1]
    dz = dy
    if silu:
        dz = jax.vjp(jax.nn.silu, _conv(x_BSE, w_EW, b_E, reach_BT))[1](dy.astype(acc))[0].astype(dy.dtype)
        # The barrier makes XLA compute dz once, instead of once per tap below.
        dz = jax.lax.optimization_barrier(dz)
    taps, by_tap = range(width), [_within(dz, reach_BT, width - 1 - i) for i in range(width)]
    padded = [jnp.pad(dz, ((0, 0), (width - 1, width - 1), (0, 0))).astype(acc) for dz in by_tap]
    dx: Any = sum(padded[i][:, width - 1 - i : width - 1 - i + x_BSE.shape[1]] * w_EW[:, i] for i in taps)
    dz, x = dz.astype(acc), x_BSE.astype(acc)
    dw = jnp.stack([jnp.sum(by_tap[i].astype(acc) * x[:, i : i + n_out], axis=(0, 1)) for i in taps], axis=1)
    return dx.astype(x_BSE.dtype), dw, None if b_E is None else jnp.sum(dz, axis=(0, 1)), None


_conv_act.defvjp(_conv_act_forward, _conv_act_backward)
