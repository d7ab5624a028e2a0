"""Cut time into chunks; products and rematerialisation of the delta rules.

The computations within chunks run for all chunks at once (the WY form of DeltaNet, arXiv 2406.06484, section 3, and
similar forms). `state_scan` and `state_passing` compute the states at the chunk starts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.numerics import accumulation_dtype

# Checkpoint names of the values that a chunked op saves for its backward pass, in addition to its inputs.
SAVED = ("chunk_states", "chunk_inverse")


def split_chunks(x_BT: Array, chunk: int) -> Array:
    """Cut time into chunks, zero-padded: [B, T, ...] -> [B, c, C, ...]."""
    n_chunks = -(-x_BT.shape[1] // chunk)
    padding = [(0, 0), (0, n_chunks * chunk - x_BT.shape[1])] + [(0, 0)] * (x_BT.ndim - 2)
    return jnp.pad(x_BT, padding).reshape(x_BT.shape[0], n_chunks, chunk, *x_BT.shape[2:])


def join_chunks(x_BcC: Array, seq_len: int) -> Array:
    """Undo `split_chunks` and remove its padding: [B, c, C, ...] -> [B, T, ...]."""
    return x_BcC.reshape(x_BcC.shape[0], -1, *x_BcC.shape[3:])[:, :seq_len]


def to_chunks(x: Array, chunk: int) -> Array:
    """Cut [B, T, H, ...] into zero-padded chunks [c, B, H, C, ...]."""
    x = split_chunks(x, chunk)
    return jnp.transpose(x, (1, 0, 3, 2, *range(4, x.ndim)))


def from_chunks(x_cBHCV: Array, seq_len: int) -> Array:
    """Join chunks [c, B, H, C, V] to [B, T, H, V], without the padding."""
    return join_chunks(jnp.transpose(x_cBHCV, (1, 0, 3, 2, 4)), seq_len)


def product(spec: str, x: Array, y: Array) -> Array:
    """Return an einsum of two operands, accumulated and returned in at least float32."""
    return jnp.einsum(spec, x, y, preferred_element_type=accumulation_dtype(x))


def carry_precision(dtype: Any) -> jax.lax.Precision:
    """Return the precision of the state scan's float32 products.

    TF32 is sufficient for 16-bit inputs.
    """
    return jax.lax.Precision.DEFAULT if jnp.finfo(dtype).bits == 16 else jax.lax.Precision.HIGHEST


def rematerialized(fn: Any) -> Any:
    """Return `fn(chunk, ...)` under rematerialisation.

    It saves only its inputs, the chunk-start states and the inverses.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED)
    return jax.checkpoint(fn, policy=policy, prevent_cse=False, static_argnums=(0,))
