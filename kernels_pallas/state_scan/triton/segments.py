"""A pass over time in segments, where there are too few sequences to fill the device: how long, and the states between.

A program of such a pass takes a block of columns of the state through all chunks, which nothing but more columns would
do faster. So each segment first makes of a state of zero its last one, and of the identity the matrix M that it
multiplies a state with, all side by side. Then S <- M S + N over the segments, and the pass itself from their starts.
"""

import jax.numpy as jnp
from jax import Array

from kernels_pallas.state_scan.triton.scan import products_share
from kernels_pallas.triton import interpreter

# Programs of a pass are brought to at most so many, three for each multiprocessor of an H100, by segments of at least
# so many chunks.
PROGRAMS, SHORTEST = 396, 8


def length(n_programs: int, n_chunks: int, *, work: float) -> int:
    """Return the chunks per segment for so many programs of a pass over so many chunks; all, if segments gain little.

    `work` is what both passes together have of one without segments. These have to be twice as many, because programs
    that share a multiprocessor are slower.
    """
    enough, shortest = (48, 1) if interpreter.is_chosen() else (PROGRAMS, SHORTEST)
    most = min(enough // n_programs, n_chunks // shortest)
    return n_chunks if most < 2 * work else -(-n_chunks // most)


def starts(ends_BsHKN: Array, start_BHKV: Array, *, reverse: bool) -> Array:
    """Return the states before the segments [B, s, H, K, V], in reverse those behind them, from `start`.

    ends [B, s, H, K, V + K] has what a segment makes of zero and, in the last K columns, of the identity; float32.
    """
    V = start_BHKV.shape[-1]
    ends = jnp.moveaxis(ends_BsHKN, 1, 0)
    p = jnp.swapaxes(ends[..., V:], -1, -2) if reverse else ends[..., V:]  # which the kernel multiplies with P^T
    no_decay = jnp.zeros((*ends.shape[:3], 1), ends.dtype)
    states, _ = products_share(no_decay, p, ends[..., :V], start_BHKV, is_single=False, reverse=reverse)
    return jnp.moveaxis(states, 0, 1)
