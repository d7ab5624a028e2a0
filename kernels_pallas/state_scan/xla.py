"""The states at chunk starts as `lax.scan`: one step of a few small kernels per chunk.

    products      S_{c+1} = diag(d_c) S_c + P_c S_c + R_c       (reverse: from the last chunk, with P_c^T)
    elementwise   S_{c+1} = d_c * S_c + R_c

Both return the state before each chunk (in reverse: behind each chunk) and the one after the last that was visited.
"""

import jax
import jax.numpy as jnp
from jax import Array


def products(
    decay_cBHk: Array, p_cBHKK: Array, r_cBHKV: Array, s_BHKV: Array, *, precision: jax.lax.Precision, reverse: bool
) -> tuple[Array, Array]:
    """(states [c, B, H, K, V], last [B, H, K, V]); `decay` has K entries per head, or one."""

    def body(s, xs):
        decay, p, r = xs
        p = jnp.swapaxes(p, -1, -2) if reverse else p
        return decay[..., None] * s + r + jnp.matmul(p, s, precision=precision), s

    last, states = jax.lax.scan(body, s_BHKV, (decay_cBHk, p_cBHKK, r_cBHKV), reverse=reverse)
    return states, last


def elementwise(decay_Bc: Array, update_Bc: Array, initial_B: Array, *, reverse: bool) -> tuple[Array, Array]:
    """(states [B, c, ...], last [B, ...]); `decay` broadcasts against `update` but on the axis of chunks."""

    def body(state, xs):
        factor, add = xs
        return factor * state + add, state

    xs = (jnp.moveaxis(decay_Bc, 1, 0), jnp.moveaxis(update_Bc, 1, 0))
    last, states = jax.lax.scan(body, initial_B, xs, reverse=reverse)
    return jnp.moveaxis(states, 0, 1), last
