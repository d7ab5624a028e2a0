"""RWKV-7's recurrence operands from their equations; the tests' oracle."""

import math

import jax
import jax.numpy as jnp

from kernels_pallas.wkv7_operands.interface import LowRank, Operands, ValueMix, Vectors


def wkv7_operands(
    r_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    decay: LowRank,
    eta: LowRank,
    vectors: Vectors,
    mix: ValueMix | None,
) -> Operands:
    """Compute `kernels_pallas.wkv7_operands` without intermediate rounding."""

    def share(map_: LowRank) -> jax.Array:
        return jax.nn.sigmoid((map_.bias_D + map_.hidden_BTR @ map_.matrix_RD).reshape(k_BTHK.shape))

    k_k_HK, k_a_HK, r_k_HK = (x.reshape(k_BTHK.shape[2:]) for x in vectors)
    kappa = k_BTHK * k_k_HK
    kappa = kappa / jnp.sqrt(jnp.maximum((kappa**2).sum(-1, keepdims=True), 1e-24))
    eta_BTHK, v = share(eta), v_BTHK
    k = k_BTHK * (1 + (eta_BTHK - 1) * k_a_HK)
    if mix is not None:
        v = jnp.where(mix.is_first_layer, v, v + (mix.first_BTHK - v) * share(mix.share))
    bonus_BTH = (r_BTHK * k * r_k_HK).sum(-1)
    first = None if mix is None else mix.first_BTHK
    return Operands(r_BTHK, k, v, -math.exp(-0.5) * share(decay), -kappa, kappa * eta_BTHK, (v, bonus_BTH), first)
