"""The `xla` backend of linear attention with a decay per key channel.

Chunked matrix products; equations in `api.py`. Decays, states and sums are float32, and products use the dtype of v.
The backward pass keeps only the inputs. JAX differentiates everything except the scores (`xla_scores.py`).
`xla_low_rank.py` handles a and b.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.chunks import join_chunks, split_chunks
from kernels_pallas.linear_attention import xla_low_rank
from kernels_pallas.linear_attention.interface import FLOOR, LinearAttention, every_decay
from kernels_pallas.linear_attention.xla_scores import decayed_scores
from kernels_pallas.state_scan.api import state_passing


def load() -> LinearAttention:
    """Return this module."""
    from kernels_pallas.linear_attention import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    r_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    log_w_BTHK: Array,
    u_HK: Array | None,
    a_BTHK: Array | None,
    b_BTHK: Array | None,
    initial_BHKV: Array,
    *,
    chunk_size: int,
    min_log_w: float,
) -> tuple[Array, Array]:
    """Return (o_BTHV, last state)."""
    chunk = min(chunk_size, v_BTHV.shape[1])
    if a_BTHK is not None:
        is_mild = chunk * max(min_log_w, FLOOR) > xla_low_rank.STRONGEST
        chunked = xla_low_rank.mild_decays if is_mild else xla_low_rank.any_decays
        return chunked(chunk, r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, a_BTHK, b_BTHK, initial_BHKV)
    return _chunked(r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, u_HK, initial_BHKV, chunk)


@functools.partial(jax.checkpoint, static_argnums=(6,), prevent_cse=False)
def _chunked(
    r_BTHK: Array, k_BTHK: Array, v_BTHV: Array, log_w_BTHK: Array, u_HK: Array | None, initial_BHKV: Array, chunk: int
) -> tuple[Array, Array]:
    acc, dtype, seq_len = log_w_BTHK.dtype, v_BTHV.dtype, v_BTHV.shape[1]
    log_w_BTHK = every_decay(log_w_BTHK, r_BTHK)
    # The zero padding at the end neither decays the state nor adds to it.
    r_BcHCK, k_BcHCK, v_BcHCV, log_w_BcHCK = (
        jnp.moveaxis(split_chunks(t, chunk), 3, 2) for t in (r_BTHK, k_BTHK, v_BTHV, log_w_BTHK)
    )
    g_BcHCK = jnp.cumsum(log_w_BcHCK, axis=-2)
    before_BcHCK = g_BcHCK if u_HK is None else g_BcHCK - log_w_BcHCK
    r32_BcHCK, k32_BcHCK = r_BcHCK.astype(acc), k_BcHCK.astype(acc)
    weighted_r_BcHCK = r32_BcHCK if u_HK is None else r32_BcHCK * u_HK.astype(acc)[:, None]
    bonus_BcHC = jnp.sum(weighted_r_BcHCK * k32_BcHCK, axis=-1)
    scores_BcHCC: Any = decayed_scores(r32_BcHCK, k32_BcHCK, before_BcHCK, g_BcHCK, dtype)
    scores_BcHCC = scores_BcHCC.astype(dtype)
    inside_BcHCV = jnp.einsum("bchij,bchjv->bchiv", scores_BcHCC, v_BcHCV, preferred_element_type=acc)
    inside_BcHCV += bonus_BcHC[..., None] * v_BcHCV.astype(acc)
    k_to_end_BcHCK = (k32_BcHCK * jnp.exp(g_BcHCK[..., -1:, :] - g_BcHCK)).astype(dtype)
    update_BcHKV = jnp.einsum("bchjk,bchjv->bchkv", k_to_end_BcHCK, v_BcHCV, preferred_element_type=acc)
    decay_BcHK = jnp.exp(g_BcHCK[..., -1, :])
    states_BcHKV, last_BHKV = state_passing(decay_BcHK[..., None], update_BcHKV, initial_BHKV)
    decayed_r_BcHCK = (r32_BcHCK * jnp.exp(before_BcHCK)).astype(dtype)
    states_BcHKV = states_BcHKV.astype(dtype)
    across_BcHCV = jnp.einsum("bchik,bchkv->bchiv", decayed_r_BcHCK, states_BcHKV, preferred_element_type=acc)
    y_BcHCV = inside_BcHCV + across_BcHCV
    return join_chunks(jnp.moveaxis(y_BcHCV, 2, 3), seq_len).astype(dtype), last_BHKV
