"""Cutting time into chunks, as every chunked recurrence does."""

import jax.numpy as jnp
from jax import Array


def cut(x_BT: Array, chunk: int) -> Array:
    """[B, T, ...] -> [B, c, C, ...], zeros after the end."""
    n_chunks = -(-x_BT.shape[1] // chunk)
    padding = [(0, 0), (0, n_chunks * chunk - x_BT.shape[1])] + [(0, 0)] * (x_BT.ndim - 2)
    return jnp.pad(x_BT, padding).reshape(x_BT.shape[0], n_chunks, chunk, *x_BT.shape[2:])


def join(x_BcC: Array, seq_len: int) -> Array:
    """[B, c, C, ...] -> [B, T, ...], without what `cut` added."""
    return x_BcC.reshape(x_BcC.shape[0], -1, *x_BcC.shape[3:])[:, :seq_len]
