"""Chunk-start states from their definition, chunk by chunk; the tests' oracle."""

import jax.numpy as jnp
from jax import Array


def state_scan(decay_cBHk: Array, p_cBHKK: Array, r_cBHKV: Array, s_BHKV: Array) -> tuple[Array, Array]:
    """Compute `kernels_pallas.state_scan` in full precision."""
    states = [s_BHKV]
    for decay, p, r in zip(decay_cBHk, p_cBHKK, r_cBHKV, strict=True):
        states.append(decay[..., None] * states[-1] + jnp.matmul(p, states[-1], precision="highest") + r)
    return jnp.stack(states[:-1]), states[-1]


def state_passing(decay_Bc: Array, update_Bc: Array, initial_B: Array) -> tuple[Array, Array]:
    """Compute `kernels_pallas.state_passing`."""
    states = [initial_B]
    for i in range(update_Bc.shape[1]):
        states.append(decay_Bc[:, i] * states[-1] + update_Bc[:, i])
    return jnp.stack(states[:-1], 1), states[-1]
