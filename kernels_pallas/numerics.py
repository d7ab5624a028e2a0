"""Constants and numerical conventions that several ops and backends share."""

import math

import jax.numpy as jnp
from jax import Array

LOG2_E = 1 / math.log(2)  # e^x = 2^(x LOG2_E): the kernels' exponentials are powers of two

# A masked score. Finite, so that a row of masked scores gives exp(0) and not NaN; never a real score.
MASKED = -1e30


def accumulation_dtype(*arrays: Array) -> jnp.dtype:
    """Return what scores, states and sums of these are kept in: float32, or float64 for inputs that are."""
    return jnp.promote_types(jnp.result_type(*(x.dtype for x in arrays)), jnp.float32)


def softmax_scale(scale: float | None, key_dim: int) -> float:
    """Return the factor of the scores: 1 / sqrt(K) unless it is given."""
    return 1.0 / math.sqrt(key_dim) if scale is None else float(scale)


def score_bound(q_BTHK: Array, k_BTGK: Array) -> Array:
    """Return [B, H] fp32 that no |q . k| of the head exceeds, by Cauchy and Schwarz over the largest norms."""
    square = [jnp.max(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1), axis=1) for x in (q_BTHK, k_BTGK)]
    return jnp.sqrt(square[0] * jnp.repeat(square[1], q_BTHK.shape[2] // k_BTGK.shape[2], axis=1))
