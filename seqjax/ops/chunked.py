"""The parts that chunked recurrences share: splitting time into chunks, products and their precision, and remat.

The computation within a chunk runs for all chunks at once (the WY form of DeltaNet, arXiv 2406.06484, section 3, and
similar forms); `kernels_pallas.state_scan` and `state_passing` compute the states at the chunk starts.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import accumulation_dtype, join_chunks, split_chunks
from seqjax.types import Array

# Names of the values that a chunked op saves for its backward pass, in addition to its inputs.
SAVED = ("chunk_states", "chunk_inverse")


def rematerialized(fn: Any) -> Any:
    """Return `fn(chunk, ...)` under remat, which saves only its inputs, the chunk-start states and the inverses."""
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED)
    return jax.checkpoint(fn, policy=policy, prevent_cse=False, static_argnums=(0,))


def to_chunks(x: Array, chunk: int) -> Array:
    """Split [B, T, H, ...] into chunks [c, B, H, C, ...], padded with zeros at the end."""
    x = split_chunks(x, chunk)
    return jnp.transpose(x, (1, 0, 3, 2, *range(4, x.ndim)))


def from_chunks(x_cBHCV: Array, seq_len: int) -> Array:
    """Join chunks [c, B, H, C, V] to [B, T, H, V], without the padding."""
    return join_chunks(jnp.transpose(x_cBHCV, (1, 0, 3, 2, 4)), seq_len)


def product(spec: str, x: Array, y: Array) -> Array:
    """Return an einsum of two operands, accumulated and returned in at least float32."""
    return jnp.einsum(spec, x, y, preferred_element_type=accumulation_dtype(x))


def carry_precision(dtype: Any) -> jax.lax.Precision:
    """Return the precision of the state scan's float32 products: TF32 suffices for 16-bit inputs."""
    return jax.lax.Precision.DEFAULT if jnp.finfo(dtype).bits == 16 else jax.lax.Precision.HIGHEST
