"""Interface of the cross-entropy backends."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array


@runtime_checkable
class CrossEntropy(Protocol):
    """The losses, and the gradient of their weighted sum."""

    def run(self, logits_BCO: Array, targets_BC: Array, weights_BC: Array, *, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Return losses_BC and the gradient g_BCO in `dtype`.

        Operands as in `api.cross_entropy`.
        """
        ...
