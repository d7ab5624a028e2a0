"""The `xla` backend of PaTH's walk: a scan over the chunks, last to first.

At each step all queries meet one chunk. Memory is linear in T. Scores are computed for all pairs of queries and chunks
and masked unless the chunk is earlier. The backward pass computes them again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.backend import Backend
from kernels_pallas.path_walk.interface import PathWalk

_float32 = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def run(
    q_cBHCK: Array,
    k_cBHCK: Array,
    v_cBHCV: Array,
    product_cBHKK: Array,
    forgotten_cBHC: Array | None,
    own_cBHCV: Array,
    lse_cBHC: Array,
) -> Array:
    """Return o_cBHCV."""
    numbers_c = jnp.arange(len(q_cBHCK))
    forgotten_cBHC1 = None if forgotten_cBHC is None else forgotten_cBHC[..., None]

    @jax.checkpoint
    def body(carry: tuple[Array, ...], xs: tuple[Array, ...]) -> tuple[tuple[Array, ...], None]:
        q_cBHCK, most_cBHC1, sum_cBHC1, o_cBHCV = carry
        number, k_BHCK, v_BHCV, product_BHKK, *forgotten_BHC1 = xs
        later_c = (numbers_c > number)[:, None, None, None, None]
        s_cBHCC = _float32(q_cBHCK.astype(k_BHCK.dtype), k_BHCK.mT)
        if forgotten_cBHC1 is not None:
            s_cBHCC = s_cBHCC + forgotten_cBHC1 - forgotten_BHC1[0].mT
        s_cBHCC = jnp.where(later_c, s_cBHCC, -jnp.inf)
        more_cBHC1 = jnp.maximum(most_cBHC1, s_cBHCC.max(-1, keepdims=True))
        weights_cBHCC, kept_cBHC1 = jnp.exp(s_cBHCC - more_cBHC1), jnp.exp(most_cBHC1 - more_cBHC1)
        sum_cBHC1 = sum_cBHC1 * kept_cBHC1 + weights_cBHCC.sum(-1, keepdims=True)
        o_cBHCV = o_cBHCV * kept_cBHC1 + _float32(weights_cBHCC.astype(v_BHCV.dtype), v_BHCV)
        q_cBHCK = jnp.where(later_c, q_cBHCK - _float32(q_cBHCK, product_BHKK), q_cBHCK)
        return (q_cBHCK, more_cBHC1, sum_cBHC1, o_cBHCV), None

    xs = numbers_c, k_cBHCK, v_cBHCV, product_cBHKK
    xs += () if forgotten_cBHC1 is None else (forgotten_cBHC1,)
    most_cBHC1 = lse_cBHC[..., None]
    carry = q_cBHCK, most_cBHC1, jnp.ones_like(most_cBHC1), own_cBHCV
    (_, _, sum_cBHC1, o_cBHCV), _ = lax.scan(body, carry, xs, reverse=True)
    return o_cBHCV / sum_cBHC1


def load() -> PathWalk:
    """Return this module."""
    from kernels_pallas.path_walk import xla

    return xla


BACKEND = Backend("xla", load)
