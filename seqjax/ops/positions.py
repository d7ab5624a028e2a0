"""Rotary position embedding and ALiBi slopes; angles are float32 for every dtype."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np

from seqjax.types import Array


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes: 2^(-8 i / n), interpolated if n is not a power of 2.

    Press et al., arXiv 2108.12409.
    """
    n = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return tuple(slopes + [2 ** (-8 * (2 * i + 1) / (2 * n)) for i in range(heads - n)])


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A reduction of RoPE frequencies for sequences longer than in earlier training.

    linear: all frequencies are divided by `factor` (position interpolation; Chen et al., arXiv 2306.15595).

    llama3: as in Llama 3.1, the divisor depends on the number of turns in `original_len` tokens, the longest sequence
    in the earlier training. Frequencies with at most `low_freq_factor` turns are divided by `factor`; frequencies with
    at least `high_freq_factor` turns are unchanged. In between, the two are interpolated linearly in the number of
    turns.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: int


def rope_frequencies(*, head_dim: int, base: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Return the radians per position of each pair, float64 [K/2].

    They are base^(-2m / K) before any `scaling`.
    """
    frequency_J = base ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return frequency_J
    kept_J = np.zeros_like(frequency_J)
    if scaling.kind == "llama3":
        turns_J = scaling.original_len * frequency_J / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_J = np.clip((turns_J - low) / (high - low), 0, 1)
    return frequency_J * (kept_J + (1 - kept_J) / scaling.factor)


def rope_angles(
    positions_T: Array, *, head_dim: int, base: float, max_len: int, scaling: RopeScaling | None = None
) -> tuple[Array, Array]:
    """Return cos and sin of position * frequency, float32 [T, K/2], or [B, T, K/2] for positions [B, T].

    Positions are integers below `max_len`. float32 cannot represent position * frequency at 100k tokens (the error is
    up to 0.006 rad), and a float64 table with a row per position would be a large constant in the program. So the
    position is split into two digits in base sqrt(max_len), each with a small table computed in float64, and the two
    angles are added by the rotation identity.
    """
    digit = max(1, math.isqrt(max_len - 1) + 1)
    frequency_J = rope_frequencies(head_dim=head_dim, base=base, scaling=scaling)
    low_SJ = np.arange(digit)[:, None] * frequency_J
    high_SJ = digit * low_SJ
    tables = [jnp.asarray(t, jnp.float32) for t in (np.cos(low_SJ), np.sin(low_SJ), np.cos(high_SJ), np.sin(high_SJ))]
    i_T, j_T = positions_T % digit, positions_T // digit
    cos_low_TJ, sin_low_TJ = tables[0][i_T], tables[1][i_T]
    cos_high_TJ, sin_high_TJ = tables[2][j_T], tables[3][j_T]
    cos_TJ = cos_high_TJ * cos_low_TJ - sin_high_TJ * sin_low_TJ
    return cos_TJ, sin_high_TJ * cos_low_TJ + cos_high_TJ * sin_low_TJ


def rope(x_BTHK: Array, cos_TJ: Array, sin_TJ: Array) -> Array:
    """Rotate the pairs (x_m, x_{m + R/2}) by the angles [T, R/2] from `rope_angles`.

    With positions per sequence, the angles are [B, T, R/2]. The half-split pairing is Llama's. Channels from R on are
    not rotated (partial RoPE).
    """
    if (width := 2 * cos_TJ.shape[-1]) < x_BTHK.shape[-1]:
        return jnp.concatenate([rope(x_BTHK[..., :width], cos_TJ, sin_TJ), x_BTHK[..., width:]], axis=-1)
    a_BTHJ, b_BTHJ = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    cos_T1J, sin_T1J = cos_TJ[..., None, :], sin_TJ[..., None, :]
    rotated = [a_BTHJ * cos_T1J - b_BTHJ * sin_T1J, b_BTHJ * cos_T1J + a_BTHJ * sin_T1J]
    return jnp.concatenate(rotated, axis=-1).astype(x_BTHK.dtype)
