"""The `xla` backend of KDA and Gated DeltaNet-2: gates as array code, then `linear_attention`."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.kda.interface import Kda
from kernels_pallas.linear_attention import xla as linear_attention


def load() -> Kda:
    """Return this module."""
    from kernels_pallas.kda import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    decay_BTHK: Array,
    beta: Array,
    rate_H: Array,
    bias_HK: Array,
    initial_BHKV: Array,
    *,
    lower_bound: float | None,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Return (o_BTHV, last state)."""
    k, log_w, a = operands(k_BTHK, decay_BTHK, beta, rate_H, bias_HK, lower_bound)
    options = {"chunk_size": chunk_size, "min_log_w": -math.inf if lower_bound is None else lower_bound}
    return linear_attention.run(q_BTHK, k, v_BTHV, log_w, None, a, None, initial_BHKV, **options)


@functools.partial(jax.checkpoint, static_argnums=(5,), prevent_cse=False)
def operands(
    k_BTHK: Array, decay_BTHK: Array, beta: Array, rate_H: Array, bias_HK: Array, lower_bound: float | None
) -> tuple[Array, Array, Array]:
    """Return keys, log decays and a of `linear_attention`, whose b is k; keys and a in the dtype of k."""
    log_w_BTHK = log_decay(decay_BTHK, rate_H, bias_HK, lower_bound)
    gate, acc = jax.nn.sigmoid(beta.astype(log_w_BTHK.dtype)), log_w_BTHK.dtype
    a_BTHK, written_BTHK = -jnp.exp(log_w_BTHK) * k_BTHK.astype(acc), k_BTHK
    if beta.ndim == a_BTHK.ndim:
        a_BTHK = gate * a_BTHK
    else:
        written_BTHK = gate[..., None] * k_BTHK.astype(acc)
    return written_BTHK.astype(k_BTHK.dtype), log_w_BTHK, a_BTHK.astype(k_BTHK.dtype)


def log_decay(decay_BTHK: Array, rate_H: Array, bias_HK: Array, lower_bound: float | None) -> Array:
    """Return the log decay, in the dtype of the bias."""
    x_BTHK, rate_H1 = decay_BTHK.astype(bias_HK.dtype) + bias_HK, rate_H[:, None]
    if lower_bound is None:
        return -rate_H1 * jax.nn.softplus(x_BTHK)
    return lower_bound * jax.nn.sigmoid(rate_H1 * x_BTHK)
