"""The `xla` backend of linear attention with a decay per channel: matrix products over all chunks side by side.

Equations in `api.py`. log w has no lower bound, so k e^{-g} may overflow. The scores A = r|k are therefore computed
recursively. Their lower left quarter is the product of r e^{g' - g*} and k e^{g* - g} with g' the sum that r reads and
g* the sum up to the middle, with exponents at most 0. The diagonal quarters are halved again down to blocks of 16, in
which the exponential of the difference itself is computed. Decays, states and sums are float32, products take the dtype
of v; only the inputs are saved for the backward pass. JAX differentiates all but the scores.
`xla_low_rank.py` has the form with a and b.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.chunks import join_chunks, split_chunks
from kernels_pallas.linear_attention import xla_low_rank
from kernels_pallas.linear_attention.interface import LinearAttention, every_decay
from kernels_pallas.state_scan.api import state_passing

BLOCK = 16  # side of the diagonal blocks that are not halved


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
) -> tuple[Array, Array]:
    """Return (o_BTHV, the last state)."""
    chunk = min(chunk_size, v_BTHV.shape[1])
    if a_BTHK is not None:
        return xla_low_rank.chunked(chunk, r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, a_BTHK, b_BTHK, initial_BHKV)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def decayed_scores(r: Array, k: Array, before: Array, g: Array, dtype: Any) -> Array:
    """Return sum_n r_in k_jn e^{before_in - g_jn} for j < i, else 0, [..., C, C]; products are in `dtype`."""
    size = r.shape[-2]
    if size <= BLOCK or size % 2:
        weight = _decay(before, g)
        # The barrier keeps this in its own kernel: XLA would fuse it into its consumers, with one thread per sum.
        return jax.lax.optimization_barrier(jnp.sum(r[..., :, None, :] * k[..., None, :, :] * weight, axis=-1))
    diagonal: Any = decayed_scores(*(_halves(x) for x in (r, k, before, g)), dtype)
    left, right, _, _ = _corner(r, k, before, g, dtype)
    corner = jnp.einsum("...ik,...jk->...ij", left, right, preferred_element_type=r.dtype)
    top = jnp.concatenate([diagonal[..., 0, :, :], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, diagonal[..., 1, :, :]], axis=-1)], axis=-2)


def _scores_forward(r: Array, k: Array, before: Array, g: Array, dtype: Any):
    return decayed_scores(r, k, before, g, dtype), (r, k, before, g)


def _scores_backward(dtype: Any, saved: tuple[Array, ...], ds: Array) -> tuple[Array, ...]:
    """Return the gradients; those of the exponents are r * dr and -k * dk, so two sums suffice."""
    r, k, before, g = saved
    dr, dk = _scores_vjp(r, k, before, g, ds, dtype)
    return dr, dk, r * dr, -k * dk


decayed_scores.defvjp(_scores_forward, _scores_backward)


def _scores_vjp(r: Array, k: Array, before: Array, g: Array, ds: Array, dtype: Any) -> tuple[Array, Array]:
    """Return dr_i = sum_j ds_ij k_j e^{...} and dk_j = sum_i ds_ij r_i e^{...}, computed recursively as the scores."""
    size = r.shape[-2]
    if size <= BLOCK or size % 2:
        weight = ds[..., None] * _decay(before, g)
        dr = jnp.sum(weight * k[..., None, :, :], axis=-2)
        dk = jnp.sum(weight * r[..., :, None, :], axis=-3)
        return jax.lax.optimization_barrier((dr, dk))
    half = size // 2
    quarters = jnp.stack([ds[..., :half, :half], ds[..., half:, half:]], axis=-3)
    dr, dk = _scores_vjp(_halves(r), _halves(k), _halves(before), _halves(g), quarters, dtype)
    left, right, grow, shrink = _corner(r, k, before, g, dtype)
    corner = ds[..., half:, :half].astype(dtype)
    low = jnp.einsum("...ij,...jk->...ik", corner, right, preferred_element_type=r.dtype) * grow
    high = jnp.einsum("...ij,...ik->...jk", corner, left, preferred_element_type=r.dtype) * shrink
    dr = jnp.concatenate([dr[..., 0, :, :], dr[..., 1, :, :] + low], axis=-2)
    return dr, jnp.concatenate([dk[..., 0, :, :] + high, dk[..., 1, :, :]], axis=-2)


def _decay(before: Array, g: Array) -> Array:
    """Return e^{before_i - g_j} for j < i, else 0, [..., C, C, K]; masked before the exponential."""
    i, j = jnp.arange(g.shape[-2])[:, None], jnp.arange(g.shape[-2])[None]
    return jnp.exp(jnp.where((j < i)[..., None], before[..., :, None, :] - g[..., None, :, :], -jnp.inf))


def _halves(x: Array) -> Array:
    """Reshape [..., C, K] to [..., 2, C / 2, K]."""
    return x.reshape(*x.shape[:-2], 2, x.shape[-2] // 2, x.shape[-1])


def _corner(r: Array, k: Array, before: Array, g: Array, dtype: Any) -> tuple[Array, Array, Array, Array]:
    """Return the factors of the lower left quarter and their exponentials, relative to the sum up to the middle."""
    half = r.shape[-2] // 2
    middle = g[..., half - 1 : half, :]
    grow = jnp.exp(before[..., half:, :] - middle)
    shrink = jnp.exp(middle - g[..., :half, :])
    return (r[..., half:, :] * grow).astype(dtype), (k[..., :half, :] * shrink).astype(dtype), grow, shrink
