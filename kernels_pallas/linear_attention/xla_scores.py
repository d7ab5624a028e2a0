"""Scores inside a chunk for key-channel decays of any strength (`xla` backend).

log w has no lower bound, so y e^{-g} may overflow. The scores x|y are therefore computed recursively. Let g' be the sum
that x reads and g* the sum up to the middle. The lower left quarter is the product of x e^{g' - g*} and y e^{g* - g},
whose exponents are at most 0. The diagonal quarters are halved again, down to blocks of 16, which exponentiate the
difference directly. All blocks share one axis, because XLA's CPU products support at most seven axes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

BLOCK = 16  # side length of diagonal blocks: not halved again


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def decayed_scores(r: Array, k: Array, before: Array, g: Array, dtype: Any) -> Array:
    """Return sum_n r_in k_jn e^{before_in - g_jn} for j < i, else 0: [..., C, C].

    Matrix products use `dtype`.
    """
    return _scores(*(x[..., None, :, :] for x in (r, k, before, g)), dtype=dtype)[..., 0, :, :]


def _scores(r: Array, k: Array, before: Array, g: Array, dtype: Any) -> Array:
    """Return the scores of each block: [..., n, C, K] -> [..., n, C, C]."""
    size = r.shape[-2]
    if size <= BLOCK or size % 2:
        weight = _decay(before, g)
        # The barrier keeps the sum in a separate kernel: fused into its consumers, XLA would use one thread per sum.
        return jax.lax.optimization_barrier(jnp.sum(r[..., :, None, :] * k[..., None, :, :] * weight, axis=-1))
    diagonal = _pairs(_scores(*(_halves(x) for x in (r, k, before, g)), dtype=dtype))
    left, right, _, _ = _corner(r, k, before, g, dtype)
    corner = jnp.einsum("...ik,...jk->...ij", left, right, preferred_element_type=r.dtype)
    top = jnp.concatenate([diagonal[..., 0, :, :], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, diagonal[..., 1, :, :]], axis=-1)], axis=-2)


def _scores_forward(r: Array, k: Array, before: Array, g: Array, dtype: Any):
    return decayed_scores(r, k, before, g, dtype), (r, k, before, g)


def _scores_backward(dtype: Any, saved: tuple[Array, ...], ds: Array) -> tuple[Array, ...]:
    """Return the gradients; those for the exponents are r * dr and -k * dk."""
    r, k, before, g = saved
    blocks = (x[..., None, :, :] for x in (r, k, before, g, ds))
    dr, dk = (x[..., 0, :, :] for x in _scores_vjp(*blocks, dtype=dtype))
    return dr, dk, r * dr, -k * dk


decayed_scores.defvjp(_scores_forward, _scores_backward)


def _scores_vjp(r: Array, k: Array, before: Array, g: Array, ds: Array, dtype: Any) -> tuple[Array, Array]:
    """Return dr_i = sum_j ds_ij k_j e^{...} and dk_j = sum_i ds_ij r_i e^{...}.

    The recursion is the same as for the scores.
    """
    size = r.shape[-2]
    if size <= BLOCK or size % 2:
        weight = ds[..., None] * _decay(before, g)
        dr = jnp.sum(weight * k[..., None, :, :], axis=-2)
        dk = jnp.sum(weight * r[..., :, None, :], axis=-3)
        return jax.lax.optimization_barrier((dr, dk))
    half = size // 2
    quarters = jnp.stack([ds[..., :half, :half], ds[..., half:, half:]], axis=-3)
    quarters = quarters.reshape(*ds.shape[:-3], -1, half, half)
    halves = (_halves(x) for x in (r, k, before, g))
    dr, dk = (_pairs(x) for x in _scores_vjp(*halves, ds=quarters, dtype=dtype))
    left, right, grow, shrink = _corner(r, k, before, g, dtype)
    corner = ds[..., half:, :half].astype(dtype)
    low = jnp.einsum("...ij,...jk->...ik", corner, right, preferred_element_type=r.dtype) * grow
    high = jnp.einsum("...ij,...ik->...jk", corner, left, preferred_element_type=r.dtype) * shrink
    dr = jnp.concatenate([dr[..., 0, :, :], dr[..., 1, :, :] + low], axis=-2)
    return dr, jnp.concatenate([dk[..., 0, :, :] + high, dk[..., 1, :, :]], axis=-2)


def _decay(before: Array, g: Array) -> Array:
    """Return e^{before_i - g_j} for j < i, else 0: [..., C, C, K].

    The mask comes before the exponential.
    """
    i, j = jnp.arange(g.shape[-2])[:, None], jnp.arange(g.shape[-2])[None]
    return jnp.exp(jnp.where((j < i)[..., None], before[..., :, None, :] - g[..., None, :, :], -jnp.inf))


def _halves(x: Array) -> Array:
    """Reshape [..., n, C, K] to [..., 2 n, C / 2, K]."""
    return x.reshape(*x.shape[:-3], 2 * x.shape[-3], x.shape[-2] // 2, x.shape[-1])


def _pairs(x: Array) -> Array:
    """Reshape [..., 2 n, C, K] to [..., n, 2, C, K]."""
    return x.reshape(*x.shape[:-3], x.shape[-3] // 2, 2, *x.shape[-2:])


def _corner(r: Array, k: Array, before: Array, g: Array, dtype: Any) -> tuple[Array, Array, Array, Array]:
    """Return the factors of the lower left quarter and their exponentials.

    Exponents are relative to the sum up to the middle.
    """
    half = r.shape[-2] // 2
    middle = g[..., half - 1 : half, :]
    grow = jnp.exp(before[..., half:, :] - middle)
    shrink = jnp.exp(middle - g[..., :half, :])
    return (r[..., half:, :] * grow).astype(dtype), (k[..., :half, :] * shrink).astype(dtype), grow, shrink
