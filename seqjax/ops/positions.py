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
    frequency_J = base ** (-np.arange(0, head_dim, 2) / head_dim)
    low_SJ = np.arange(digit)[:, None] * frequency_J
    high_SJ = digit * low_SJ
    tables = [jnp.asarray(t, jnp.float32) for t in (np.cos(low_SJ), np.sin(low_SJ), np.cos(high_SJ), np.sin(high_SJ))]
    i_T, j_T = positions_T % digit, positions_T // digit
    cos_low_TJ, sin_low_TJ = tables[0][i_T], tables[1][i_T]
    cos_high_TJ, sin_high_TJ = tables[2][j_T], tables[3][j_T]
    cos_TJ = cos_high_TJ * cos_low_TJ - sin_high_TJ * sin_low_TJ
    return cos_TJ, sin_high_TJ * cos_low_TJ + cos_high_TJ * sin_low_TJ


def rope(x_BTHK: Array, cos_TJ: Array, sin_TJ: Array) -> Array:
    """Rotate the pairs (x_m, x_{m + K/2}) by the angles of `rope_angles` (half-split pairing, as in Llama)."""
    a_BTHJ, b_BTHJ = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    cos_T1J, sin_T1J = cos_TJ[:, None, :], sin_TJ[:, None, :]
    rotated = [a_BTHJ * cos_T1J - b_BTHJ * sin_T1J, b_BTHJ * cos_T1J + a_BTHJ * sin_T1J]
    return jnp.concatenate(rotated, axis=-1).astype(x_BTHK.dtype)
