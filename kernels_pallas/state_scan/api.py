"""Chunk-start states of linear recurrences, with interchangeable backends.

The caller computes the matrix products within chunks, for all chunks at once. Only the chunk-start states are
sequential:

    state_scan      S_{c+1} = diag(d_c) S_c + P_c S_c + R_c      S [K, V], key index first; chunk axis first
    state_passing   S_{c+1} = d_c * S_c + R_c                    S of any shape; chunk axis second

The first is the recurrence between chunks of DeltaNet's WY form (arXiv 2406.06484, section 3) and similar forms. The
second is the state passing of Mamba-2 (arXiv 2405.21060, section 6). The backward pass is the same scan in reverse,
over the state gradient L:

    L_c = diag(d_c) L_{c+1} + P_c^T L_{c+1} + dS_c,   dR_c = L_{c+1}

The gradients of d and P are products over all chunks at once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.state_scan import triton, xla
from kernels_pallas.state_scan.interface import StateScan

BACKENDS = (triton.BACKEND, xla.BACKEND)


def state_scan(
    decay_cBHk: Float[Array, "c B H k"],
    p_cBHKK: Float[Array, "c B H K K"],
    r_cBHKV: Float[Array, "c B H K V"],
    s_BHKV: Float[Array, "B H K V"],
    *,
    precision: jax.lax.Precision,
    implementation: str | None = None,
) -> tuple[Float[Array, "c B H K V"], Float[Array, "B H K V"]]:
    """Return the state at each chunk start and the state after the last chunk.

    Args:
      decay_cBHk: decays d, K entries per head or one; fp32 (fp64 under x64), like every operand.
      p_cBHKK: P, the linear map that each chunk adds to its decay.
      r_cBHKV: update of each chunk.
      s_BHKV: state before the first chunk.
      precision: precision of the products with P.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      (states_cBHKV, last_BHKV). Remat policies can keep the states by the name `chunk_states`.

    Raises:
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: arXiv 2406.06484, section 3.
    """
    arrays = (decay_cBHk, p_cBHKK, r_cBHKV, s_BHKV)
    kernels = backend.pick("state_scan", BACKENDS, implementation, arrays, {"key_dim": s_BHKV.shape[-2]})
    states: Any = _scan(*arrays, precision, kernels)
    return states


def state_passing(
    decay_Bc: Float[Array, "..."],
    update_Bc: Float[Array, "B c ..."],
    initial_B: Float[Array, "B ..."],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "B c ..."], Float[Array, "B ..."]]:
    """Return the states at chunk starts and after the last chunk, for an elementwise decay.

    Args:
      decay_Bc: decays d, with as many axes as `update_Bc`: c entries for the chunks, all or one along other axes.
      update_Bc: update of each chunk; fp32 (fp64 under x64).
      initial_B: state before the first chunk.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      (states [B, c, ...], last [B, ...]) in the dtype of `update_Bc`.

    Raises:
      BackendError: (a ValueError) the chosen implementation of "state_scan" cannot run the call.

    Source: arXiv 2405.21060, section 6.
    """
    arrays = (decay_Bc, update_Bc, initial_B.astype(update_Bc.dtype))
    kernels = backend.pick("state_scan", BACKENDS, implementation, arrays, {"key_dim": 0})
    states: Any = _pass(*arrays, kernels)
    return states


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _scan(decay: Array, p: Array, r: Array, s: Array, precision: jax.lax.Precision, kernels: StateScan):
    return kernels.products(decay, p, r, s, precision=precision, reverse=False)


def _scan_forward(decay: Array, p: Array, r: Array, s: Array, precision: jax.lax.Precision, kernels: StateScan):
    states: Any = _scan(decay, p, r, s, precision, kernels)
    starts, final = states
    starts = checkpoint_name(starts, "chunk_states")
    return (starts, final), (decay, p, starts)


def _scan_backward(
    precision: jax.lax.Precision,
    kernels: StateScan,
    saved: tuple[Array, Array, Array],
    cotangents: tuple[Array, Array],
):
    decay, p, starts = saved
    d_starts, d_final = cotangents
    d_r, d_s = kernels.products(decay, p, d_starts, d_final, precision=precision, reverse=True)
    d_p = jnp.einsum("...kv,...jv->...kj", d_r, starts, precision=precision)
    d_decay = jnp.sum(d_r * starts, -1)
    if decay.shape[-1] == 1:
        d_decay = jnp.sum(d_decay, -1, keepdims=True)
    return d_decay, d_p, d_r, d_s


_scan.defvjp(_scan_forward, _scan_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _pass(decay: Array, update: Array, initial: Array, kernels: StateScan) -> tuple[Array, Array]:
    return kernels.elementwise(decay, update, initial, reverse=False)


def _pass_forward(decay: Array, update: Array, initial: Array, kernels: StateScan):
    states: Any = _pass(decay, update, initial, kernels)
    return states, (decay, states[0])


def _pass_backward(kernels: StateScan, saved: tuple[Array, Array], cotangents: tuple[Array, Array]):
    decay, states = saved
    d_states, d_last = cotangents
    d_update, d_initial = kernels.elementwise(decay, d_states, d_last, reverse=True)
    repeated = [i for i, (have, want) in enumerate(zip(decay.shape, states.shape, strict=True)) if have != want]
    d_decay = jnp.sum(d_update * states, axis=repeated, keepdims=True)
    return d_decay.astype(decay.dtype), d_update, d_initial


_pass.defvjp(_pass_forward, _pass_backward)
