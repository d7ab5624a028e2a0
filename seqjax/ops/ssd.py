"""Linear recurrence with one decay per head (state space duality), in chunks.

    S_t = a_t S_{t-1} + b_t x_t^T,   y_t = c_t S_t        S [N, V] per head, b and c shared by the heads

Dao and Gu, arXiv 2405.21060 (Mamba-2), section 6. With g the running sum of log a inside a chunk:

    Y = ((C B^T) * G) X + e^g * (C S),   G_ij = e^{g_i - g_j} for j <= i, else 0
    S <- e^{g_end} S + (B * e^{g_end - g})^T X

Only differences of g are exponentiated, masked before the exponential: above the diagonal they would overflow. Decays,
states and sums are float32; the products take the dtype of `x_BTHV`. The backward pass keeps the inputs alone and
computes the chunks again, so memory is linear in T.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from kernels_pallas.chunks import cut, join
from seqjax.ops._chunks import accumulator, carry_states
from seqjax.types import Array

CHUNK = 128
# A decay of e^-60 leaves nothing in float32; below it, sums of log a would lose the digits of their differences.
FLOOR = -60.0


def ssd(
    x_BTHV: Float[Array, "B T H V"],
    log_a_BTH: Float[Array, "B T H"],
    b_BTN: Float[Array, "B T N"],
    c_BTN: Float[Array, "B T N"],
    *,
    initial_state: Float[Array, "B H N V"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H N V"]]:
    """Outputs, in the dtype of `x_BTHV`, and with `return_state` the float32 state after the last token.

    `x_BTHV` comes multiplied by its step size. `log_a_BTH` is at most 0; float32 is advised. The result does not
    depend on `chunk_size` (default 128, at most T).
    """
    n_batch, seq_len, n_heads, n_value = x_BTHV.shape
    acc = accumulator(x_BTHV, log_a_BTH)
    if initial_state is None:
        initial_state = jnp.zeros((n_batch, n_heads, b_BTN.shape[-1], n_value), acc)
    chunk = min(chunk_size or CHUNK, seq_len)
    log_a_BTH = jnp.maximum(log_a_BTH.astype(acc), FLOOR)
    y_BTHV, state = _chunked(x_BTHV, log_a_BTH, b_BTN, c_BTN, initial_state.astype(acc), chunk)
    return (y_BTHV, state) if return_state else y_BTHV


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
