"""The `xla` cross-entropy backend: any device, also sharded vocabularies.

XLA makes three passes over the logits: maximum, sum of exponentials, gradient.
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.cross_entropy.interface import CrossEntropy


def load() -> CrossEntropy:
    """Return this module."""
    from kernels_pallas.cross_entropy import xla

    return xla


BACKEND = Backend("xla", load)


def run(logits_BCO: Array, targets_BC: Array, weights_BC: Array, *, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Return (losses_BC, g_BCO)."""
    lse_BC = jax.nn.logsumexp(logits_BCO, axis=-1)
    target_logit_BC = jnp.take_along_axis(logits_BCO, targets_BC[..., None], axis=-1)[..., 0]
    p_BCO = jnp.exp(logits_BCO - lse_BC[..., None])
    one_hot_BCO = targets_BC[..., None] == jnp.arange(logits_BCO.shape[-1])
    return lse_BC - target_logit_BC, ((p_BCO - one_hot_BCO) * weights_BC[..., None]).astype(dtype)
