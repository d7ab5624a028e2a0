"""Scores of the random selection: hashes of a query's position, a head and a chunk, for every backend the same.

They depend on nothing that a model computes and on no generator of JAX, so training, prefill and decoding select the
same chunks, in every layer and every sequence. The mixing of bits is the last step of MurmurHash3 (public domain).
"""

import jax.numpy as jnp
from jax import Array

GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: zeros must not hash to zero


def random_scores(position: Array, head: Array, chunk: Array) -> Array:
    """Return a float32 integer in [0, 2^24) for each triple of integers; the arguments broadcast."""
    bits = jnp.zeros((), jnp.uint32)
    for x in (position, head, chunk):
        bits = _mix(bits + x.astype(jnp.uint32) + jnp.uint32(GOLDEN))
    return (bits >> 8).astype(jnp.float32)


def _mix(bits: Array) -> Array:
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
