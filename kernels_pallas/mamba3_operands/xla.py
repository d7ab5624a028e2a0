"""The `xla` backend of Mamba-3's operands: array code, differentiated by JAX."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.mamba3_operands.interface import Mamba3Operands, Operands
from kernels_pallas.numerics import accumulation_dtype


def load() -> Mamba3Operands:
    """Return this module."""
    from kernels_pallas.mamba3_operands import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    b_BTN: Array,
    c_BTN: Array,
    turn_BTR: Array,
    dt_BTH: Array,
    b_bias_HN: Array,
    c_bias_HN: Array,
    before_BN: Array,
    start_BHR: Array,
) -> Operands:
    """Return the operands."""
    turns_BTHR = sum_of_turns(turn_BTR[:, :, None] * dt_BTH[..., None], start_BHR)
    # Concatenated with the previous token so that each bias is added only once: devices then sum its gradient once.
    b_BSHN, c_BTHN = biased(_after(before_BN, b_BTN), b_bias_HN), biased(c_BTN, c_bias_HN)
    own_BTH = jnp.sum(c_BTHN * b_BSHN[:, 1:], axis=-1)
    k_BTHN = rotated(b_BSHN[:, :-1], _after(start_BHR, turns_BTHR)[:, :-1])
    q_BTHN = rotated(c_BTHN, turns_BTHR)
    return Operands(k_BTHN.astype(b_BTN.dtype), q_BTHN.astype(b_BTN.dtype), own_BTH, turns_BTHR[:, -1])


def biased(x_BTN: Array, bias_HN: Array) -> Array:
    """Return x plus a bias per head, [B, T, H, N] in float32 or wider."""
    return x_BTN.astype(accumulation_dtype(x_BTN))[:, :, None] + bias_HN


def _after(first: Array, x: Array) -> Array:
    """Return x [B, T, ...] preceded by the previous token's `first` [B, ...].

    The result is [B, 1 + T, ...].
    """
    return jnp.concatenate([first.astype(x.dtype)[:, None], x], axis=1)


def add_turns(a: Array, b: Array) -> Array:
    """Return a + b modulo 1."""
    return a + b - jnp.floor(a + b)


def sum_of_turns(turn_BTHR: Array, start_BHR: Array) -> Array:
    """Return `start_BHR` plus all turns up to each token, modulo 1.

    Partial sums drop their integer part, which keeps float32 precision over thousands of tokens.
    """
    return add_turns(jax.lax.associative_scan(add_turns, turn_BTHR, axis=1), start_BHR[:, None])


def rotated(x_BTHN: Array, turns_BTHR: Array) -> Array:
    """Rotate the channel pairs (2m, 2m + 1), m < R, and keep the other channels."""
    n_rotated = 2 * turns_BTHR.shape[-1]
    radians = 2 * math.pi * turns_BTHR
    cos, sin = jnp.cos(radians), jnp.sin(radians)
    even, odd = x_BTHN[..., :n_rotated:2], x_BTHN[..., 1:n_rotated:2]
    pairs = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([pairs.reshape(*x_BTHN.shape[:-1], n_rotated), x_BTHN[..., n_rotated:]], axis=-1)
