"""Rotary position embedding and ALiBi's slopes. Angles are float32 for every input dtype."""

import math

import jax.numpy as jnp
import numpy as np

from seqjax.types import Array


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes (Press et al., arXiv 2108.12409): 2^(-8 i / n), interpolated if n is not a power of 2."""
    n = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return tuple(slopes + [2 ** (-8 * (2 * i + 1) / (2 * n)) for i in range(heads - n)])


def rope_angles(positions_T: Array, *, head_dim: int, base: float, max_len: int) -> tuple[Array, Array]:
    """Return cos and sin of position * base^(-2m / K), float32 [T, K/2], for integer positions below `max_len`.

    float32 cannot represent position * frequency at 100k tokens (the error is up to 0.006 rad), and a float64 table of
    every position would be a large constant in the program. So the position is split into two digits of base
    sqrt(max_len), each with a small table made in float64, and the two angles are added by the rotation identity.
    """
    digit = max(1, math.isqrt(max_len - 1) + 1)
    frequency = base ** (-np.arange(0, head_dim, 2) / head_dim)
    low = np.arange(digit)[:, None] * frequency
    high = digit * low
    table = [jnp.asarray(t, jnp.float32) for t in (np.cos(low), np.sin(low), np.cos(high), np.sin(high))]
    i, j = positions_T % digit, positions_T // digit
    cos_low, sin_low, cos_high, sin_high = table[0][i], table[1][i], table[2][j], table[3][j]
    return cos_high * cos_low - sin_high * sin_low, sin_high * cos_low + cos_high * sin_low


def rope(x_BTHK: Array, cos_TK: Array, sin_TK: Array) -> Array:
    """Rotate the pairs (x_m, x_{m + K/2}) by the angles of `rope_angles` (half-split pairing, as in Llama)."""
    a, b = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_TK[:, None, :], sin_TK[:, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHK.dtype)
