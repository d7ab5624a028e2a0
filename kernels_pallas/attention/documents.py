"""Packed documents in causal attention: which keys a query reads, and gate sums that restart.

Documents are contiguous (segments.py), so query i reads the keys first_i <= j <= i, and key j is read by the queries
j <= i < end_j. Both bounds never decrease along time, and both include a window. Gate sums restart at each document:
otherwise the gates of an earlier document would change the rounding of later ones.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.segments import first_tokens, positions


def first_keys(segments_BT: Array, window: int) -> Array:
    """Return the first key that each query reads, int32 [B, T]."""
    before_BT = positions(segments_BT)
    if window:
        before_BT = jnp.minimum(before_BT, window - 1)
    return jnp.arange(segments_BT.shape[1], dtype=jnp.int32) - before_BT


def end_of_queries(segments_BT: Array, window: int) -> Array:
    """Return the end of the queries that read each key, int32 [B, T]."""
    T = segments_BT.shape[1]
    t_T = jnp.arange(T, dtype=jnp.int32)
    begins_BT = jnp.where(first_tokens(segments_BT), t_T, T)
    next_BT = jnp.concatenate([begins_BT[:, 1:], jnp.full_like(begins_BT[:, :1], T)], axis=1)
    end_BT = jax.lax.cummin(next_BT, axis=1, reverse=True)
    return jnp.minimum(end_BT, t_T + window) if window else end_BT


def last_tokens(segments_BT: Array) -> Array:
    """Return whether each token ends a document, bool [B, T]; the last token of a sequence does not."""
    return jnp.concatenate([first_tokens(segments_BT)[:, 1:], jnp.zeros_like(segments_BT[:, :1], bool)], axis=1)


def restarting_scan(add: Callable, x: tuple[Array, ...], restart: Array, *, axis: int) -> tuple[Array, ...]:
    """Return the running sums of `x` by `add(a, b)`, which restart where `restart` is True.

    No sum depends on values before its restart, not even in its last bit.
    """

    def join(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        (*x, x_restart), (*y, y_restart) = a, b
        sums = add(tuple(x), tuple(y))
        return *(jnp.where(y_restart, own, both) for own, both in zip(y, sums, strict=True)), x_restart | y_restart

    *sums, _ = jax.lax.associative_scan(join, (*x, jnp.broadcast_to(restart, x[0].shape)), axis=axis)
    return tuple(sums)


def restarting_sum(x: Array, restart: Array, *, axis: int, reverse: bool = False) -> Array:
    """Return the running sum along an axis, which restarts where `restart` is True.

    In reverse order, `restart` marks the ends.
    """
    if reverse:
        return jnp.flip(restarting_sum(jnp.flip(x, axis), jnp.flip(restart, axis), axis=axis), axis)
    return restarting_scan(lambda a, b: (a[0] + b[0],), (x,), restart, axis=axis)[0]
