"""Chunks of a linear recurrence, and the one part of it that is sequential: the state at the start of each chunk.

S_{c+1} = diag(d_c) S_c + P_c S_c + R_c with S [K, V] (key index first). Everything within a chunk is written for all
chunks at once by the caller (the WY form of DeltaNet, arXiv 2406.06484, section 3, and its kin), which leaves one
small matrix product per chunk to the scan. The backward pass is the same scan from the end,
L_c = diag(d_c) L_{c+1} + P_c^T L_{c+1} + dS_c; the gradients of d, P and R are products over all chunks at once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from kernels_pallas import dispatch
from kernels_pallas.chunks import cut, join
from seqjax.types import Array

# What a chunked op keeps for its backward pass beside its inputs.
SAVED = ("chunk_states", "chunk_inverse")


def rematerialized(fn: Any) -> Any:
    """`fn(chunk, ...)` that keeps its inputs, the chunk-start states and the inverses, and computes the rest again."""
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED)
    return jax.checkpoint(fn, policy=policy, prevent_cse=False, static_argnums=(0,))


def to_chunks(x: Array, chunk: int) -> Array:
    """[B, T, H, ...] -> [c, B, H, C, ...], padded with zeros at the end."""
    x = cut(x, chunk)
    return jnp.transpose(x, (1, 0, 3, 2, *range(4, x.ndim)))


def from_chunks(x_cBHCV: Array, seq_len: int) -> Array:
    """[c, B, H, C, V] -> [B, T, H, V], without the padding."""
    return join(jnp.transpose(x_cBHCV, (1, 0, 3, 2, 4)), seq_len)


def product(spec: str, x: Array, y: Array) -> Array:
    """An einsum of 16-bit (or whatever they are) operands, accumulated and returned in at least float32."""
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def carry_precision(dtype: Any) -> jax.lax.Precision:
    """Of the products of the carry, whose operands are float32: TF32 where the inputs had 8 bits anyway."""
    return jax.lax.Precision.DEFAULT if jnp.finfo(dtype).bits == 16 else jax.lax.Precision.HIGHEST


def state_scan(
    decay_cBHk: Float[Array, "c B H k"],
    p_cBHKK: Float[Array, "c B H K K"],
    r_cBHKV: Float[Array, "c B H K V"],
    s_BHKV: Float[Array, "B H K V"],
    *,
    precision: jax.lax.Precision,
    implementation: str | None = None,
) -> tuple[Float[Array, "c B H K V"], Float[Array, "B H K V"]]:
    """The state at the start of every chunk, and after the last; `decay` has K entries per head, or one.

    Raises BackendError when the named implementation of "state_scan" cannot run this.
    """
    arrays = (decay_cBHk, p_cBHKK, r_cBHKV, s_BHKV)
    backend = dispatch.pick("state_scan", implementation, arrays, {"key_dim": s_BHKV.shape[-2]})
    states: Any = _state_scan(*arrays, precision, backend)
    return states


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _state_scan(decay, p, r, s, precision, backend):
    return backend.products(decay, p, r, s, precision=precision, reverse=False)


def _forward(decay, p, r, s, precision, backend):
    states: Any = _state_scan(decay, p, r, s, precision, backend)
    starts, final = states
    starts = checkpoint_name(starts, "chunk_states")
    return (starts, final), (decay, p, starts)


def _backward(precision, backend, residuals, cotangents):
    decay, p, starts = residuals
    d_starts, d_final = cotangents
    d_r, d_s = backend.products(decay, p, d_starts, d_final, precision=precision, reverse=True)
    d_p = jnp.einsum("...kv,...jv->...kj", d_r, starts, precision=precision)
    d_decay = jnp.sum(d_r * starts, -1)
    if decay.shape[-1] == 1:
        d_decay = jnp.sum(d_decay, -1, keepdims=True)
    return d_decay, d_p, d_r, d_s


_state_scan.defvjp(_forward, _backward)
