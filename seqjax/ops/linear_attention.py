"""Linear attention with a decay per channel and a bonus for the current token: RWKV-5 and RWKV-6, in chunks.

    y_t = r_t (S_{t-1} + diag(u) k_t^T v_t),   S_t = diag(w_t) S_{t-1} + k_t^T v_t        S [K, V] per head

Peng et al., arXiv 2404.05892; RWKV-5's decay is constant in time. With g the running sum of log w inside a chunk and
g' = g - log w (the sum before the token):

    A_ij = sum_n r_in k_jn e^{g'_in - g_jn} for j < i,   A_ii = sum_n r_in u_n k_in
    Y = A V + (r * e^{g'}) S,   S <- diag(e^{g_end}) S + (k * e^{g_end - g})^T V

log w has no lower bound, so k e^{-g} may overflow. A is therefore computed recursively. Its lower left quarter is the
product of r e^{g' - g*} and k e^{g* - g} with g* the sum up to the middle, with exponents at most 0. The diagonal
quarters are halved again down to blocks of 16, in which the exponential of the difference itself is computed. Decays,
states and sums are float32; only the inputs are saved for the backward pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from kernels_pallas import accumulation_dtype, join_chunks, split_chunks, state_passing
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 64
# A decay of e^-60 is negligible in float32; below it, differences of sums of log w would lose precision.
FLOOR = -60.0
BLOCK = 16  # side of the diagonal blocks that are not halved


def wkv6(
    r_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_w_BTHK: Float[Array, "#B #T H K"],
    u_HK: Float[Array, "H K"],
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs in the dtype of `v_BTHV`, and with `return_state` the float32 state after the last token.

    `log_w_BTHK` <= 0 has no lower bound; float32 is advised. Its B and T may be 1 (a constant decay). The
    result does not depend on `chunk_size` (default 64, at most T).
    """
    n_batch, seq_len, n_heads, n_key = r_BTHK.shape
    acc = accumulation_dtype(v_BTHV, log_w_BTHK)
    if initial_state is None:
        initial_state = jnp.zeros((n_batch, n_heads, n_key, v_BTHV.shape[-1]), acc)
    if seq_len == 1 and return_state:  # decoding
        log_w_BHK = jnp.maximum(log_w_BTHK[:, 0].astype(acc), FLOOR)
        y_BHV, state_BHKV = _step(r_BTHK[:, 0], k_BTHK[:, 0], v_BTHV[:, 0], log_w_BHK, u_HK, initial_state.astype(acc))
        return y_BHV[:, None], state_BHKV
    r_BTHK, k_BTHK, v_BTHV, log_w_BTHK = (time_to_heads(x) for x in (r_BTHK, k_BTHK, v_BTHV, log_w_BTHK))
    chunk = min(chunk_size or CHUNK, seq_len)
    y_BTHV, state_BHKV = _chunked(r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, u_HK, initial_state.astype(acc), chunk)
    y_BTHV = heads_to_time(y_BTHV)
    return (y_BTHV, state_BHKV) if return_state else y_BTHV


def _step(
    r_BHK: Array, k_BHK: Array, v_BHV: Array, log_w_BHK: Array, u_HK: Array, s_BHKV: Array
) -> tuple[Array, Array]:
    """Return the output and the state of one token; decoding then reads and writes the state, and little else."""
    acc = s_BHKV.dtype
    r_BHK1, k_BHK1, v_BH1V = r_BHK.astype(acc)[..., None], k_BHK.astype(acc)[..., None], v_BHV.astype(acc)[:, :, None]
    y_BHV = jnp.sum(r_BHK1 * (s_BHKV + u_HK.astype(acc)[..., None] * k_BHK1 * v_BH1V), axis=-2)
    return y_BHV.astype(v_BHV.dtype), jnp.exp(log_w_BHK)[..., None] * s_BHKV + k_BHK1 * v_BH1V


@functools.partial(jax.checkpoint, static_argnums=(6,), prevent_cse=False)
def _chunked(
    r_BTHK: Array, k_BTHK: Array, v_BTHV: Array, log_w_BTHK: Array, u_HK: Array, initial_BHKV: Array, chunk: int
) -> tuple[Array, Array]:
    acc, dtype, seq_len = initial_BHKV.dtype, v_BTHV.dtype, v_BTHV.shape[1]
    log_w_BTHK = jnp.broadcast_to(jnp.maximum(log_w_BTHK.astype(acc), FLOOR), r_BTHK.shape)
    # The zero padding at the end neither decays the state nor adds to it.
    r_BcHCK, k_BcHCK, v_BcHCV, log_w_BcHCK = (
        jnp.moveaxis(split_chunks(t, chunk), 3, 2) for t in (r_BTHK, k_BTHK, v_BTHV, log_w_BTHK)
    )
    g_BcHCK = jnp.cumsum(log_w_BcHCK, axis=-2)
    before_BcHCK = g_BcHCK - log_w_BcHCK
    r32_BcHCK, k32_BcHCK = r_BcHCK.astype(acc), k_BcHCK.astype(acc)
    bonus_BcHC = jnp.sum(r32_BcHCK * u_HK.astype(acc)[:, None] * k32_BcHCK, axis=-1)
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
