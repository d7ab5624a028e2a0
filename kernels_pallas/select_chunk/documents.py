"""Packed documents in chunk selection: which chunks a query may select, and which of their keys it reads.

The chunks are chunks of the packed sequence. Documents are contiguous (segments.py), so only the last document of a
chunk has queries in later chunks. With s(i) the first token of token i's document:

    a query's candidates     the past chunks c >= s(i) // C: their last token is in the query's document
    a chunk's readable keys  the keys j >= s(last token of the chunk), the same for all of these queries

Scores and means cover readable keys only. In both cases, and in the local chunk, a query reads the keys j >= s(i).
"""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.segments import positions


def starts(segments_BT: Array) -> Array:
    """Return the first token of each token's document, int32 [B, T]."""
    return jnp.arange(segments_BT.shape[1], dtype=jnp.int32) - positions(segments_BT)


def begins(segments_BT: Array, chunk_size: int) -> Array:
    """Return the first readable key of each chunk, counted from the chunk's start: int32 [B, c].

    A partial last chunk, which no query selects, is included.
    """
    T = segments_BT.shape[1]
    first_c = jnp.arange(-(-T // chunk_size), dtype=jnp.int32) * chunk_size
    last_c = jnp.minimum(first_c + chunk_size, T) - 1
    return jnp.maximum(starts(segments_BT)[:, last_c] - first_c, 0)


def readable(segments_BT: Array, chunk_size: int) -> Array:
    """Return whether each key of each chunk is readable, bool [B, c, C]."""
    return jnp.arange(chunk_size) >= begins(segments_BT, chunk_size)[..., None]


def readable_keys(k_BTGK: Array, segments_BT: Array, chunk_size: int) -> Array:
    """Return the keys, with zeros for keys that are not readable."""
    B, T = segments_BT.shape
    is_readable_BT = readable(segments_BT, chunk_size).reshape(B, -1)[:, :T]
    return jnp.where(is_readable_BT[..., None, None], k_BTGK, 0)
