"""Carrying a state across chunks, differentiable, over the elementwise form of `state_scan`.

A linear recurrence is split at chunk starts: inside a chunk everything is a matrix product over its tokens, and only
the states at the starts, S_{c+1} = decay_c * S_c + update_c, are computed one after the other. The backward pass is
the same from the end, L_c = decay_c * L_{c+1} + dS_c, with dupdate_c = L_{c+1} and ddecay_c = L_{c+1} S_c.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import dispatch


def carry_states(
    decay_Bc: Array, update_Bc: Array, initial_B: Array, *, implementation: str | None = None
) -> tuple[Array, Array]:
    """The state before each chunk [B, c, ...] and the one after the last [B, ...], from `update` [B, c, ...].

    `decay_Bc` has the chunks of `update_Bc` and broadcasts against it otherwise. Raises BackendError when the named
    implementation of "state_scan" cannot run this.
    """
    arrays = (decay_Bc, update_Bc, initial_B.astype(update_Bc.dtype))
    backend = dispatch.pick("state_scan", implementation, arrays, {"key_dim": 0})
    states: Any = _carry(*arrays, backend)
    return states


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _carry(decay: Array, update: Array, initial: Array, backend: Any) -> tuple[Array, Array]:
    return backend.elementwise(decay, update, initial, reverse=False)


def _forward(decay: Array, update: Array, initial: Array, backend: Any):
    states: Any = _carry(decay, update, initial, backend)
    return states, (decay, states[0])


def _backward(backend: Any, saved: tuple[Array, Array], cotangents: tuple[Array, Array]):
    decay, states = saved
    d_states, d_last = cotangents
    d_update, d_initial = backend.elementwise(decay, d_states, d_last, reverse=True)
    repeated = [i for i, (have, want) in enumerate(zip(decay.shape, states.shape, strict=True)) if have != want]
    d_decay = jnp.sum(d_update * states, axis=repeated, keepdims=True)
    return d_decay.astype(decay.dtype), d_update, d_initial


_carry.defvjp(_forward, _backward)
