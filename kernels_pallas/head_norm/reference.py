"""Norm per head with gate, directly from its equation; the tests' oracle."""

import jax
import jax.numpy as jnp
from jax import Array

ACTIVATIONS = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid, "none": lambda x: x}


def head_norm(
    x_BTHV: Array,
    gate_BTHV: Array | None,
    skip: tuple[Array, Array] | None,
    gain_HV: Array,
    bias_HV: Array | None,
    *,
    activation: str,
    gate_first: bool,
    eps: float,
    with_input: bool = False,
    dtype: str | None = None,
) -> Array | tuple[Array, Array]:
    """Compute `kernels_pallas.head_norm` in the dtype of the operands."""

    def norm(x: Array) -> Array:
        axes = (-2, -1) if gate_first else -1
        if bias_HV is not None:
            x = x - x.mean(axes, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(axes, keepdims=True) + eps) * gain_HV
        return x if bias_HV is None else x + bias_HV

    def gated(x: Array) -> Array:
        if skip is not None:
            x = x + skip[0] * skip[1][..., None]
        return x if gate_BTHV is None else x * ACTIVATIONS[activation](gate_BTHV)

    y_BTHV = norm(gated(x_BTHV)) if gate_first else gated(norm(x_BTHV))
    return (x_BTHV, y_BTHV.astype(dtype or y_BTHV.dtype)) if with_input else y_BTHV
