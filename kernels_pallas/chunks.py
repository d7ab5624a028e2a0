"""Cutting time into chunks, as every chunked recurrence does."""

import jax.numpy as jnp
from jax import Array


def split_chunks(x_BT: Array, chunk: int) -> Array:
    """Cut time into chunks, with zeros after the end: [B, T, ...] -> [B, c, C, ...]."""
    n_chunks = -(-x_BT.shape[1] // chunk)
    padding = [(0, 0), (0, n_chunks * chunk - x_BT.shape[1])] + [(0, 0)] * (x_BT.ndim - 2)
    return jnp.pad(x_BT, padding).reshape(x_BT.shape[0], n_chunks, chunk, *x_BT.shape[2:])


def join_chunks(x_BcC: Array, seq_len: int) -> Array:
    """Undo `split_chunks` and remove its padding: [B, c, C, ...] -> [B, T, ...]."""
    return x_BcC.reshape(x_BcC.shape[0], -1, *x_BcC.shape[3:])[:, :seq_len]
