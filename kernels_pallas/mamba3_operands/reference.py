"""Mamba-3's recurrence operands from their equations; the tests' oracle."""

import math

import jax
import jax.numpy as jnp

from kernels_pallas.mamba3_operands.interface import Operands


def mamba3_operands(
    b_BTN: jax.Array,
    c_BTN: jax.Array,
    turn_BTR: jax.Array,
    dt_BTH: jax.Array,
    b_bias_HN: jax.Array,
    c_bias_HN: jax.Array,
    before_BN: jax.Array,
    start_BHR: jax.Array,
) -> Operands:
    """Compute `kernels_pallas.mamba3_operands` with complex numbers.

    The last angles may differ by whole turns.
    """
    turns_BTHR = start_BHR[:, None] + jnp.cumsum(turn_BTR[:, :, None] * dt_BTH[..., None], axis=1)
    b_BSHN = jnp.concatenate([before_BN[:, None], b_BTN], axis=1)[:, :, None] + b_bias_HN
    c_BTHN = c_BTN[:, :, None] + c_bias_HN
    k = _rotated(b_BSHN[:, :-1], jnp.concatenate([start_BHR[:, None], turns_BTHR[:, :-1]], axis=1))
    own_BTH = jnp.sum(c_BTHN * b_BSHN[:, 1:], axis=-1)
    return Operands(k, _rotated(c_BTHN, turns_BTHR), own_BTH, turns_BTHR[:, -1])


def _rotated(x_BTHN: jax.Array, turns_BTHR: jax.Array) -> jax.Array:
    n_rotated = 2 * turns_BTHR.shape[-1]
    pairs = x_BTHN[..., :n_rotated].reshape(*turns_BTHR.shape, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * jnp.exp(2j * math.pi * turns_BTHR)
    flat = jnp.stack([turned.real, turned.imag], axis=-1).reshape(*x_BTHN.shape[:-1], n_rotated)
    return jnp.concatenate([flat, x_BTHN[..., n_rotated:]], axis=-1)
