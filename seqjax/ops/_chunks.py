"""What the chunked recurrences share: cutting time into chunks, and carrying a state across them.

A linear recurrence is split at chunk starts: inside a chunk everything is a matrix product over its tokens, and only
the states at the starts, S_{c+1} = decay_c * S_c + update_c, are computed one after the other.
"""

from typing import Any

import jax
import jax.numpy as jnp

from seqjax.types import Array


def accumulator(*arrays: Array) -> Any:
    """The dtype of decays, states and sums: float32, or float64 for inputs that are."""
    return jnp.result_type(jnp.float32, *arrays)


def cut(x_BT: Array, chunk: int) -> Array:
    """[B, T, ...] -> [B, c, C, ...], zeros after the end."""
    n_chunks = -(-x_BT.shape[1] // chunk)
    padding = [(0, 0), (0, n_chunks * chunk - x_BT.shape[1])] + [(0, 0)] * (x_BT.ndim - 2)
    return jnp.pad(x_BT, padding).reshape(x_BT.shape[0], n_chunks, chunk, *x_BT.shape[2:])


def join(x_BcC: Array, seq_len: int) -> Array:
    """[B, c, C, ...] -> [B, T, ...], without what `cut` added."""
    return x_BcC.reshape(x_BcC.shape[0], -1, *x_BcC.shape[3:])[:, :seq_len]


def carry_states(decay: Array, update: Array, initial: Array, *, reverse: bool = False) -> tuple[Array, Array]:
    """The state before each chunk [B, c, ...] and the one after the last, from `decay` and `update` [B, c, ...].

    In reverse it is the state behind each chunk, from the last to the first.
    """

    def body(state: Array, xs: tuple[Array, Array]) -> tuple[Array, Array]:
        factor, add = xs
        return factor * state + add, state

    xs = (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(update, 1, 0))
    last, states = jax.lax.scan(body, initial.astype(update.dtype), xs, reverse=reverse)
    return jnp.moveaxis(states, 0, 1), last
