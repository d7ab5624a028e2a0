"""The `xla` backend of SSD (Mamba-2): chunked matrix products, differentiated by JAX.

Let g be the running sum of log a inside a chunk, and B, C [Q, N] and X [Q, V] the chunk's rows:

    Y = ((C B^T) * G) X + e^g * (C S),   G_ij = e^{g_i - g_j} for j <= i, else 0
    S <- e^{g_end} S + (B * e^{g_end - g})^T X

Products use the dtype of x and run over all chunks at once. The backward pass keeps only the inputs and recomputes the
chunks.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.chunks import join_chunks, split_chunks
from kernels_pallas.ssd.interface import Ssd
from kernels_pallas.state_scan.api import state_passing


def load() -> Ssd:
    """Return this module."""
    from kernels_pallas.ssd import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    x_BTHV: Array,
    log_a_BTH: Array,
    b_BTN: Array,
    c_BTN: Array,
    initial_BHNV: Array,
    dt_BTH: Array | None,
    *,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Return (y_BTHV, last state)."""
    if dt_BTH is not None:
        x_BTHV = (x_BTHV.astype(dt_BTH.dtype) * dt_BTH[..., None]).astype(x_BTHV.dtype)
    if b_BTN.ndim == 3:
        return _chunked(x_BTHV, log_a_BTH, b_BTN, c_BTN, initial_BHNV, chunk_size)

    def one_head(x: Array, log_a: Array, b: Array, c: Array, initial: Array) -> tuple[Array, Array]:
        y, last = _chunked(x[:, :, None], log_a[:, :, None], b, c, initial[:, None], chunk_size)
        return y[:, :, 0], last[:, 0]

    by_head = jax.vmap(one_head, in_axes=(2, 2, 2, 2, 1), out_axes=(2, 1))
    return by_head(x_BTHV, log_a_BTH, b_BTN, c_BTN, initial_BHNV)


@functools.partial(jax.checkpoint, static_argnums=(5,), prevent_cse=False)
def _chunked(x: Array, log_a: Array, b: Array, c: Array, initial: Array, chunk: int) -> tuple[Array, Array]:
    acc, dtype, seq_len = log_a.dtype, x.dtype, x.shape[1]
    x, b, c = (split_chunks(t, chunk) for t in (x, b.astype(dtype), c.astype(dtype)))
    g_BcHC = jnp.cumsum(jnp.moveaxis(split_chunks(log_a, chunk), 2, 3), axis=-1)
    i, j = jnp.arange(chunk)[:, None], jnp.arange(chunk)[None]
    # Within chunks; i is the query position, j the key position.
    decay = jnp.exp(jnp.where(j <= i, g_BcHC[..., :, None] - g_BcHC[..., None, :], -jnp.inf))
    scores = jnp.einsum("bcin,bcjn->bcij", c, b, preferred_element_type=acc)
    weights = (scores[:, :, None] * decay).astype(dtype)
    intra = jnp.einsum("bchij,bcjhv->bcihv", weights, x, preferred_element_type=acc)
    # Across chunks. Heads and values stay one axis after time, so these products need no transposition.
    decay_to_end = jnp.moveaxis(jnp.exp(g_BcHC[..., -1:] - g_BcHC), 2, 3)
    weighted_x = (x * decay_to_end[..., None].astype(dtype)).reshape(*x.shape[:3], -1)
    update = jnp.einsum("bcjn,bcjw->bcnw", b, weighted_x, preferred_element_type=acc)
    update = update.reshape(*update.shape[:3], *x.shape[3:])
    decay_end = jnp.exp(g_BcHC[..., -1])[:, :, None, :, None]
    states, last = state_passing(decay_end, update, jnp.moveaxis(initial, 2, 1))
    states = states.astype(dtype).reshape(*states.shape[:3], -1)
    inter = jnp.einsum("bcin,bcnw->bciw", c, states, preferred_element_type=acc).reshape(intra.shape)
    y = intra + inter * jnp.moveaxis(jnp.exp(g_BcHC), 2, 3)[..., None]
    return join_chunks(y, seq_len).astype(dtype), jnp.moveaxis(last, 1, 2)
