"""Packed documents: ops that reset at the first token of each document.

`segments` is int32 [B, T], the number of each token's document. It never decreases along T. The first token of a
sequence is no boundary: an initial state and earlier inputs continue the first document.
"""

import jax
import jax.numpy as jnp
from jax import Array

# The log decay at the first token of a document. In float32, exp(-128) is exactly 0, and with it the state and all
# gradients that cross a boundary. In float64 it is 3e-56. Running sums of log decays contain it. This costs the later
# tokens of a chunk an absolute error of 128 * 2^-24 = 8e-6 per boundary in the chunk.
RESET = -128.0


def check_segments(segments_BT: Array | None, batch: int, time: int) -> None:
    """Raise ValueError unless `segments_BT` is None or an integer array [batch, time]."""
    if segments_BT is None:
        return
    if segments_BT.shape != (batch, time) or not jnp.issubdtype(segments_BT.dtype, jnp.integer):
        raise ValueError(
            f"segments must be integers [batch, time] = {(batch, time)}, the number of each token's document; "
            f"got {segments_BT.dtype.name} {tuple(segments_BT.shape)}"
        )


def first_tokens(segments_BT: Array) -> Array:
    """Return whether each token begins a document, bool [B, T]; the first token of a sequence does not."""
    return segments_BT != jnp.concatenate([segments_BT[:, :1], segments_BT[:, :-1]], axis=1)


def reset_decays(log_decay: Array, first_BT: Array) -> Array:
    """Return log decays [B, T, ...] that erase the state at the first token of a document.

    The replaced log decays get no gradient.
    """
    return jnp.where(_along(first_BT, log_decay), RESET, log_decay)


def keep(mask_BT: Array, x: Array) -> Array:
    """Return x [B, T, ...] where the mask is true, else 0."""
    return jnp.where(_along(mask_BT, x), x, 0)


def _along(mask_BT: Array, x: Array) -> Array:
    """Return the mask with as many axes as x [B, T, ...]."""
    return mask_BT.reshape(*mask_BT.shape, *[1] * (x.ndim - 2))


def positions(segments_BT: Array) -> Array:
    """Return each token's position in its document, int32 [B, T]."""
    t_T = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
    return t_T - jax.lax.cummax(jnp.where(first_tokens(segments_BT), t_T, 0), axis=1)


def reach(segments_BT: Array, most: int) -> Array:
    """Return how many of the `most` previous tokens belong to each token's document, int32 [B, T].

    Tokens before the sequence belong to the first document.
    """
    in_first_BT = segments_BT == segments_BT[:, :1]
    return jnp.where(in_first_BT, most, jnp.minimum(positions(segments_BT), most))
