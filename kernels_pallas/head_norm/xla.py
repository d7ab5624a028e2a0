"""The `xla` head norm: array code for any device, differentiated by JAX.

The norm has a custom VJP that computes both means of its backward pass in one pass over memory; autodiff would compute
the second mean after the first. The backward pass keeps only the inputs and the norm statistics.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas.backend import Backend
from kernels_pallas.head_norm.interface import Call, HeadNorm
from kernels_pallas.head_norm.reference import ACTIVATIONS
from kernels_pallas.numerics import accumulation_dtype

STATISTICS = "norm_statistics"  # the name that other norms use, for remat policies


def load() -> HeadNorm:
    """Return this module."""
    from kernels_pallas.head_norm import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    x_BTHV: Array,
    gate_BTHV: Array | None,
    skip: tuple[Array, Array] | None,
    gain_HV: Array,
    bias_HV: Array | None,
    call: Call,
) -> Array | tuple[Array, Array]:
    """Return y_BTHV, or (x, y)."""
    policy = jax.checkpoint_policies.save_only_these_names(STATISTICS)
    return jax.checkpoint(partial(_elements, call), policy=policy)(x_BTHV, gate_BTHV, skip, gain_HV, bias_HV)


def _elements(
    call: Call,
    x_BTHV: Array,
    gate_BTHV: Array | None,
    skip: tuple[Array, Array] | None,
    gain_HV: Array,
    bias_HV: Array | None,
) -> Array | tuple[Array, Array]:
    flat, dtype = (*x_BTHV.shape[:-2], -1), x_BTHV.dtype
    x_BTHV = x_BTHV.astype(accumulation_dtype(x_BTHV))  # float32: gradients of x are added before rounding

    def gated(y_BTHV: Array) -> Array:
        if skip is not None:
            y_BTHV = y_BTHV + skip[0] * skip[1][..., None]
        y_BTE = y_BTHV.reshape(flat)
        if gate_BTHV is None:
            return y_BTE
        return y_BTE * ACTIVATIONS[call.activation](gate_BTHV.reshape(flat).astype(gain_HV.dtype))

    def norm(x: Array, gain: Array, bias: Array | None) -> Array:
        unit: Any = _unit(x, call.eps, bias is not None)
        return unit * gain if bias is None else unit * gain + bias

    def every(parameter_HV: Array) -> Array:
        return jnp.broadcast_to(parameter_HV, x_BTHV.shape[-2:]).reshape(-1)

    if call.gate_first:
        y_BTE = norm(gated(x_BTHV), every(gain_HV), None if bias_HV is None else every(bias_HV))
    else:
        y_BTE = gated(norm(x_BTHV, gain_HV, bias_HV))
    y_BTHV = y_BTE.astype(call.dtype or dtype).reshape(x_BTHV.shape)
    return (x_BTHV.astype(dtype), y_BTHV) if call.with_input else y_BTHV


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _unit(x: Array, eps: float, center: bool) -> Array:
    """Return the norm before gain and bias, in float32 or wider."""
    return _unit_forward(x, eps, center)[0]


def _unit_forward(x: Array, eps: float, center: bool) -> tuple[Array, tuple[Array, Array | None, Array]]:
    wide, mean = x.astype(accumulation_dtype(x)), None
    if center:
        mean = checkpoint_name(jnp.mean(wide, axis=-1, keepdims=True), STATISTICS)
        wide = wide - mean
    scale = checkpoint_name(jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps), STATISTICS)
    return wide * scale, (x, mean, scale)


def _unit_backward(eps: float, center: bool, saved: tuple[Array, Array | None, Array], du: Array) -> tuple[Array]:
    del eps, center
    x, mean, scale = saved
    wide = x.astype(du.dtype)
    unit = (wide if mean is None else wide - mean) * scale
    along = jnp.mean(du * unit, axis=-1, keepdims=True)
    across = du if mean is None else du - jnp.mean(du, axis=-1, keepdims=True)
    return ((scale * (across - unit * along)).astype(x.dtype),)


_unit.defvjp(_unit_forward, _unit_backward)
