"""The `xla` backend of Mamba-2's recurrence: matrix products over all chunks side by side, differentiated by JAX.

With g the running sum of log a inside a chunk, B and C [Q, N] and X [Q, V] those of the chunk:

    Y = ((C B^T) * G) X + e^g * (C S),   G_ij = e^{g_i - g_j} for j <= i, else 0
    S <- e^{g_end} S + (B * e^{g_end - g})^T X

The products take the dtype of x. The backward pass keeps the inputs alone and computes the chunks again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.chunks import cut, join
from kernels_pallas.state_scan.carry import carry_states


def run(x, log_a, b, c, initial, dt: Array | None, *, chunk_size: int) -> tuple[Array, Array]:
    """(y [B, T, H, V], the last state)."""
    if dt is not None:
        x = (x.astype(dt.dtype) * dt[..., None]).astype(x.dtype)
    return _chunked(x, log_a, b, c, initial, chunk_size)


@functools.partial(jax.checkpoint, static_argnums=(5,), prevent_cse=False)
def _chunked(x: Array, log_a: Array, b: Array, c: Array, initial: Array, chunk: int) -> tuple[Array, Array]:
    acc, dtype, seq_len = log_a.dtype, x.dtype, x.shape[1]
    x, b, c = (cut(t, chunk) for t in (x, b.astype(dtype), c.astype(dtype)))
    g_BcHC = jnp.cumsum(jnp.moveaxis(cut(log_a, chunk), 2, 3), axis=-1)
    i, j = jnp.arange(chunk)[:, None], jnp.arange(chunk)[None]
    # inside the chunks; i is the query, j the key
    decay = jnp.exp(jnp.where(j <= i, g_BcHC[..., :, None] - g_BcHC[..., None, :], -jnp.inf))
    scores = jnp.einsum("bcin,bcjn->bcij", c, b, preferred_element_type=acc)
    mixed = (scores[:, :, None] * decay).astype(dtype)
    inside = jnp.einsum("bchij,bcjhv->bcihv", mixed, x, preferred_element_type=acc)
    # across them; heads and values stay one axis behind time, so that these products need no transposition
    rest = jnp.moveaxis(jnp.exp(g_BcHC[..., -1:] - g_BcHC), 2, 3)
    weighted = (x * rest[..., None].astype(dtype)).reshape(*x.shape[:3], -1)
    update = jnp.einsum("bcjn,bcjw->bcnw", b, weighted, preferred_element_type=acc)
    update = update.reshape(*update.shape[:3], *x.shape[3:])
    decay_end = jnp.exp(g_BcHC[..., -1])[:, :, None, :, None]
    states, last = carry_states(decay_end, update, jnp.moveaxis(initial, 2, 1))
    states = states.astype(dtype).reshape(*states.shape[:3], -1)
    across = jnp.einsum("bcin,bcnw->bciw", c, states, preferred_element_type=acc).reshape(inside.shape)
    y = inside + across * jnp.moveaxis(jnp.exp(g_BcHC), 2, 3)[..., None]
    return join(y, seq_len).astype(dtype), jnp.moveaxis(last, 1, 2)
