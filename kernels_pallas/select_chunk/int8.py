"""Round queries and keys to 8 bits for the selection "best_key_int8".

    q~_i = round(127 q_i / max |q_i|)
    k~_j = round(k_j / h_c),  h_c the smallest power of two with max_{j in c} |k_j| <= 127 h_c

The maxima cover a head's channels; for keys they also cover their chunk c, so later tokens change no step. A query's
positive factor does not change the argmax. Because h_c is a power of two, h_c k~_j and the sums q~_i . (h_c k~_j) are
exact in float32 (K <= 1,040) in any order. Every backend therefore selects the same chunk, with integer or
floating-point products.
"""

import jax.numpy as jnp
from jax import Array

MOST = 127


def quantize_queries(q_BTHK: Array) -> Array:
    """Return int8 queries with the shape of `q_BTHK`."""
    q_BTHK = q_BTHK.astype(jnp.float32)
    largest_BTH1 = jnp.abs(q_BTHK).max(-1, keepdims=True)
    return jnp.round(q_BTHK * (MOST / jnp.where(largest_BTH1 > 0, largest_BTH1, 1))).astype(jnp.int8)


def quantize_keys(k_BTGK: Array, chunk_size: int) -> tuple[Array, Array]:
    """Return the int8 keys of the full chunks and their steps.

    Shapes: keys [B, T // C * C, G, K], steps fp32 [B, T // C, G].
    """
    B, T, G, K = k_BTGK.shape
    n_full = T // chunk_size
    k_BcCGK = k_BTGK[:, : n_full * chunk_size].reshape(B, n_full, chunk_size, G, K).astype(jnp.float32)
    fraction_BcG, exponent_BcG = jnp.frexp(jnp.abs(k_BcCGK).max((2, 4)) / MOST)  # fraction is 0 or in [1/2, 1)
    step_BcG = jnp.ldexp(jnp.float32(1), exponent_BcG - (fraction_BcG == 0.5))
    k_BcCGK = jnp.round(k_BcCGK / step_BcG[:, :, None, :, None]).astype(jnp.int8)
    return k_BcCGK.reshape(B, n_full * chunk_size, G, K), step_BcG


def rounded(q_BTHK: Array, k_BTGK: Array, chunk_size: int) -> tuple[Array, Array]:
    """Return float32 queries and keys, rounded to 8 bits.

    Their best_key selection equals best_key_int8. Keys outside full chunks are zeros.
    """
    k8_BSGK, step_BcG = quantize_keys(k_BTGK, chunk_size)
    k_BSGK = k8_BSGK * jnp.repeat(step_BcG, chunk_size, axis=1)[..., None]
    rest = k_BTGK.shape[1] - k_BSGK.shape[1]
    return quantize_queries(q_BTHK).astype(jnp.float32), jnp.pad(k_BSGK, ((0, 0), (0, rest), (0, 0), (0, 0)))
