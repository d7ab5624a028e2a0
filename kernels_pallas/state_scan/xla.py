"""The `xla` backend of the chunk-start states: `lax.scan` over the chunks.

    products      S_{c+1} = diag(d_c) S_c + P_c S_c + R_c       (reverse: from the last chunk, with P_c^T)
    elementwise   S_{c+1} = d_c * S_c + R_c

A step is a few small kernels. Both return the state before each chunk (in reverse: after each chunk) and the state
after the last visited chunk.
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import device
from kernels_pallas.backend import Backend
from kernels_pallas.state_scan.interface import StateScan


def load() -> StateScan:
    """Return this module."""
    from kernels_pallas.state_scan import xla

    return xla


BACKEND = Backend("xla", load)


def products(
    decay_cBHk: Array, p_cBHKK: Array, r_cBHKV: Array, s_BHKV: Array, *, precision: jax.lax.Precision, reverse: bool
) -> tuple[Array, Array]:
    """Return (states [c, B, H, K, V], last [B, H, K, V]).

    `decay_cBHk` has K entries per head or one.
    """
    s_BHKV = unknown_to_xla(s_BHKV, r_cBHKV, axis=0)

    def body(s, xs):
        decay, p, r = xs
        p = jnp.swapaxes(p, -1, -2) if reverse else p
        return decay[..., None] * s + r + jnp.matmul(p, s, precision=precision), s

    last, states = jax.lax.scan(body, s_BHKV, (decay_cBHk, p_cBHKK, r_cBHKV), reverse=reverse)
    return states, last


def elementwise(decay_Bc: Array, update_Bc: Array, initial_B: Array, *, reverse: bool) -> tuple[Array, Array]:
    """Return (states [B, c, ...], last [B, ...]).

    `decay_Bc` broadcasts against `update_Bc`, except on the chunk axis.
    """
    initial_B = unknown_to_xla(initial_B, update_Bc, axis=1)

    def body(state, xs):
        factor, add = xs
        return factor * state + add, state

    xs = (jnp.moveaxis(decay_Bc, 1, 0), jnp.moveaxis(update_Bc, 1, 0))
    last, states = jax.lax.scan(body, initial_B, xs, reverse=reverse)
    return jnp.moveaxis(states, 0, 1), last


def unknown_to_xla(state: Array, updates: Array, *, axis: int) -> Array:
    """Hide a constant state from XLA on a CPU with a single chunk.

    There the result is state + min(|u|, 0), with u the update: the same value. XLA unrolls a loop with one iteration,
    and a zero state becomes a constant in the products that read it, both forward and as the gradient after the last
    chunk. XLA miscompiles some of these products (cpu_compiler.py). An optimization barrier does not help, because it
    is removed before XLA forms these fusions.
    """
    if updates.shape[axis] > 1 or device.platform() != "cpu":
        return state
    return state + jnp.minimum(jnp.abs(jax.lax.index_in_dim(updates, 0, axis, keepdims=False)), 0)
