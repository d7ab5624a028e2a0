"""Scores of the random selection: a hash of position, head and chunk.

The hash reads no model values and no JAX random state. Training, prefill and decoding therefore select the same chunks,
in every backend, layer and sequence. The bit mixing is the last step of MurmurHash3 (public domain).
"""

import jax.numpy as jnp
from jax import Array

GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: zeros must not hash to zero


def random_scores(position: Array, head: Array, chunk: Array) -> Array:
    """Return a float32 integer in [0, 2^24) for each triple of integers.

    The arguments broadcast.
    """
    bits = jnp.zeros((), jnp.uint32)
    for x in (position, head, chunk):
        bits = _mix(bits + x.astype(jnp.uint32) + jnp.uint32(GOLDEN))
    return (bits >> 8).astype(jnp.float32)


def _mix(bits: Array) -> Array:
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
