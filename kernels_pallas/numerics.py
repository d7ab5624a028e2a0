"""Constants and numerical conventions that several ops and backends share."""

import math

import jax.numpy as jnp
from jax import Array

LOG2_E = 1 / math.log(2)  # e^x = 2^(x LOG2_E): the kernels' exponentials are powers of two

# A masked score. It is finite: a row of masked scores gives exp(0), not NaN. Real scores are never this low.
MASKED = -1e30


def accumulation_dtype(*arrays: Array) -> jnp.dtype:
    """Return the dtype for scores, states and sums.

    It is float32, or float64 for float64 inputs.
    """
    return jnp.promote_types(jnp.result_type(*(x.dtype for x in arrays)), jnp.float32)


def softmax_scale(scale: float | None, key_dim: int) -> float:
    """Return the factor of the scores: `scale`, or 1 / sqrt(K) if it is None."""
    return 1.0 / math.sqrt(key_dim) if scale is None else float(scale)


def score_bound(q_BTHK: Array, k_BTGK: Array) -> Array:
    """Return an upper bound [B, H] fp32 on |q . k| for each head.

    By the Cauchy-Schwarz inequality: the largest query norm times the largest key norm.
    """
    square = [jnp.max(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1), axis=1) for x in (q_BTHK, k_BTGK)]
    return jnp.sqrt(square[0] * jnp.repeat(square[1], q_BTHK.shape[2] // k_BTGK.shape[2], axis=1))


def with_sign(q_BTHK: Array, scale: float) -> Array:
    """Return q times the sign of the scale.

    Some kernels compare or mask scores before they scale them.
    """
    return q_BTHK if scale > 0 else q_BTHK * jnp.sign(scale).astype(q_BTHK.dtype)
