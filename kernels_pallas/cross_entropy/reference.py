"""Cross-entropy that JAX differentiates; the oracle of the tests."""

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy(logits_BCO: Array, targets_BC: Array, weights_BC: Array) -> tuple[Array, Array]:
    """Return the losses and the gradient of their weighted sum.

    Same contract as `kernels_pallas.cross_entropy`; the gradient has the logits' dtype.
    """

    def losses(logits_BCO: Array) -> Array:
        log_p_BCO = jax.nn.log_softmax(logits_BCO, axis=-1)
        return -jnp.take_along_axis(log_p_BCO, targets_BC[..., None], axis=-1)[..., 0]

    losses_BC, pull = jax.vjp(losses, logits_BCO)
    return losses_BC, pull(weights_BC)[0]
