"""The `xla` backend of the states at chunk starts: `lax.scan`, one step of a few small kernels per chunk.

    products      S_{c+1} = diag(d_c) S_c + P_c S_c + R_c       (reverse: from the last chunk, with P_c^T)
    elementwise   S_{c+1} = d_c * S_c + R_c

Both return the state before each chunk (in reverse: after each chunk) and the state after the last visited chunk.
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
    """Return (states [c, B, H, K, V], last [B, H, K, V]); `decay` has K entries per head, or one."""
    s_BHKV = unknown_to_xla(s_BHKV, r_cBHKV, axis=0)

    def body(s, xs):
        decay, p, r = xs
        p = jnp.swapaxes(p, -1, -2) if reverse else p
        return decay[..., None] * s + r + jnp.matmul(p, s, precision=precision), s

    last, states = jax.lax.scan(body, s_BHKV, (decay_cBHk, p_cBHKK, r_cBHKV), reverse=reverse)
    return states, last


def elementwise(decay_Bc: Array, update_Bc: Array, initial_B: Array, *, reverse: bool) -> tuple[Array, Array]:
    """Return (states [B, c, ...], last [B, ...]); `decay` broadcasts against `update` but on the axis of chunks."""
    initial_B = unknown_to_xla(initial_B, update_Bc, axis=1)

    def body(state, xs):
        factor, add = xs
        return factor * state + add, state

    xs = (jnp.moveaxis(decay_Bc, 1, 0), jnp.moveaxis(update_Bc, 1, 0))
    last, states = jax.lax.scan(body, initial_B, xs, reverse=reverse)
    return jnp.moveaxis(states, 0, 1), last


def unknown_to_xla(state: Array, updates: Array, *, axis: int) -> Array:
    """Return the state plus min(|u|, 0), which is 0, on a CPU where there is one chunk, of update u.

    XLA unrolls a loop of one iteration, so a state of zeros becomes a constant in the products that read it, as the
    state in the forward pass and as the gradient after the last chunk in the backward pass. It compiles some of these
    products wrong (cpu_compiler.py). An optimization barrier does not help: it is gone before XLA forms those fusions.
    """
    if updates.shape[axis] > 1 or device.platform() != "cpu":
        return state
    return state + jnp.minimum(jnp.abs(jax.lax.index_in_dim(updates, 0, axis, keepdims=False)), 0)
