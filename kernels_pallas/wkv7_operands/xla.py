"""The `xla` backend of RWKV-7's operands: array code, differentiated by JAX.

Low-rank maps return float32 or wider. The backward pass keeps only the inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.wkv7_operands.interface import LowRank, Operands, ValueMix, Vectors, Wkv7Operands


def load() -> Wkv7Operands:
    """Return this module."""
    from kernels_pallas.wkv7_operands import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    r_BTHK: Array,
    k_BTHK: Array,
    v_BTHK: Array,
    decay: LowRank,
    eta: LowRank,
    vectors: Vectors,
    mix: ValueMix | None,
) -> Operands:
    """Return the operands."""
    k, log_w, a, b, bonus = _keys(r_BTHK, k_BTHK, decay, eta, vectors)
    v: Any = v_BTHK
    if mix is not None:
        v = jnp.where(mix.is_first_layer, v, _mixed(v, mix.first_BTHK, mix.share))
    return Operands(r_BTHK, k, v, log_w, a, b, (v, bonus), None if mix is None else mix.first_BTHK)


@jax.checkpoint
def _keys(r_BTHK: Array, k_BTHK: Array, decay: LowRank, eta: LowRank, vectors: Vectors) -> tuple[Array, ...]:
    shape, dtype, acc = k_BTHK.shape, k_BTHK.dtype, accumulation_dtype(k_BTHK)
    k_BTD = k_BTHK.reshape(*shape[:2], -1)
    log_w_BTD = -jnp.exp(-0.5) * jax.nn.sigmoid(_result(decay, acc))
    eta_BTD = jax.nn.sigmoid(_result(eta, acc))
    kappa_BTHK = (k_BTD.astype(acc) * vectors.k_k_D).reshape(shape)
    square_BTH1 = jnp.sum(kappa_BTHK * kappa_BTHK, -1, keepdims=True)
    kappa_BTHK = kappa_BTHK * jax.lax.rsqrt(jnp.maximum(square_BTH1, 1e-24))
    k_BTD = (k_BTD * (1 + (eta_BTD - 1) * vectors.k_a_D)).astype(dtype)
    k_BTHK, log_w_BTHK, eta_BTHK = (y.reshape(shape) for y in (k_BTD, log_w_BTD, eta_BTD))
    bonus_BTH = jnp.sum(r_BTHK.astype(acc) * k_BTHK * vectors.r_k_D.reshape(shape[2:]), -1)
    return k_BTHK, log_w_BTHK, -kappa_BTHK.astype(dtype), (kappa_BTHK * eta_BTHK).astype(dtype), bonus_BTH


@jax.checkpoint
def _mixed(v_BTHK: Array, first_BTHK: Array, share: LowRank) -> Array:
    acc = accumulation_dtype(v_BTHK)
    share_BTHK = jax.nn.sigmoid(_result(share, acc)).reshape(v_BTHK.shape)
    return (v_BTHK + (first_BTHK.astype(acc) - v_BTHK) * share_BTHK).astype(v_BTHK.dtype)


def _result(map_: LowRank, acc: Any) -> Array:
    """Return the result of a low-rank map, [B, T, D], in dtype `acc`."""
    hidden_BTR = map_.hidden_BTR
    return jnp.matmul(hidden_BTR, map_.matrix_RD.astype(hidden_BTR.dtype), preferred_element_type=acc) + map_.bias_D
