"""PaTH's walk chunk by chunk, in the precision of its inputs; the tests' oracle."""

import jax
import jax.numpy as jnp
from jax import Array


def path_walk(
    q_cBHCK: Array,
    k_cBHCK: Array,
    v_cBHCV: Array,
    product_cBHKK: Array,
    forgotten_cBHC: Array | None,
    own_cBHCV: Array,
    lse_cBHC: Array,
) -> Array:
    """Compute `kernels_pallas.path_walk` with one softmax per query chunk."""
    o = []
    for chunk, query_BHCK in enumerate(q_cBHCK):
        scores, values, query = [lse_cBHC[chunk][..., None]], [], query_BHCK
        for n in range(chunk)[::-1]:
            s_BHCC = query @ k_cBHCK[n].mT
            if forgotten_cBHC is not None:
                s_BHCC += forgotten_cBHC[chunk][..., None] - forgotten_cBHC[n][..., None, :]
            scores.append(s_BHCC)
            values.append(v_cBHCV[n])
            query = query - query @ product_cBHKK[n]
        weights = jax.nn.softmax(jnp.concatenate(scores, -1), axis=-1)
        of_own = weights[..., :1] * own_cBHCV[chunk]
        o.append(of_own + weights[..., 1:] @ jnp.concatenate(values, -2) if values else of_own)
    return jnp.stack(o)
