"""What the chunked recurrences share: cutting time into chunks, products and their precision, what to keep.

Everything within a chunk is written for all chunks at once (the WY form of DeltaNet, arXiv 2406.06484, section 3, and
its kin); the states at the chunk starts are what `kernels_pallas.state_scan` and `state_passing` compute.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import accumulation_dtype, join_chunks, split_chunks
from seqjax.types import Array

# What a chunked op keeps for its backward pass beside its inputs.
SAVED = ("chunk_states", "chunk_inverse")


def rematerialized(fn: Any) -> Any:
    """Return `fn(chunk, ...)` so that it keeps inputs, chunk-start states and inverses, and computes the rest again."""
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED)
    return jax.checkpoint(fn, policy=policy, prevent_cse=False, static_argnums=(0,))


def to_chunks(x: Array, chunk: int) -> Array:
    """Cut [B, T, H, ...] -> [c, B, H, C, ...], padded with zeros at the end."""
    x = split_chunks(x, chunk)
    return jnp.transpose(x, (1, 0, 3, 2, *range(4, x.ndim)))


def from_chunks(x_cBHCV: Array, seq_len: int) -> Array:
    """[c, B, H, C, V] -> [B, T, H, V], without the padding."""
    return join_chunks(jnp.transpose(x_cBHCV, (1, 0, 3, 2, 4)), seq_len)


def product(spec: str, x: Array, y: Array) -> Array:
    """Return an einsum of 16-bit (or whatever they are) operands, accumulated and returned in at least float32."""
    return jnp.einsum(spec, x, y, preferred_element_type=accumulation_dtype(x))


def carry_precision(dtype: Any) -> jax.lax.Precision:
    """Return the precision of the state scan's float32 products: TF32 where the inputs had 8 bits anyway."""
    return jax.lax.Precision.DEFAULT if jnp.finfo(dtype).bits == 16 else jax.lax.Precision.HIGHEST
