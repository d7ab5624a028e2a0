"""The loss of every token and the gradient with respect to its logits, over interchangeable backends.

With x the logits of a token, y its target, w its weight, m = max_o x_o and s = sum_o e^{x_o - m},

    loss = log s + m - x_y,   g_o = w (e^{x_o - m} / s - [o = y])

It serves a loss that goes through the tokens in chunks and needs the gradient of a chunk while its logits exist
(`seqjax.ops.cross_entropy`): the products for the gradients of hidden states and weights take g as it is.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.cross_entropy import triton, xla

BACKENDS = (triton.BACKEND, xla.BACKEND)


def cross_entropy(
    logits_BCO: Float[Array, "B C O"],
    targets_BC: Int[Array, "B C"],
    weights_BC: Float[Array, "B C"],
    *,
    dtype: jnp.dtype,
    is_vocabulary_split: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B C"], Float[Array, "B C O"]]:
    """Return the loss of every token, without its weight, and the gradient of the weighted sum of the losses.

    It is not meant to be differentiated: the gradient is a result, and the Triton kernel has no other.

    Args:
      logits_BCO: fp32 (fp64 under x64), of any vocabulary.
      targets_BC: the index of each token's target, in [0, O).
      weights_BC: the factor of each loss in the sum, in the dtype of the logits; 0 for a token that does not count.
      dtype: of the gradient, that of the products that follow.
      is_vocabulary_split: whether devices share the vocabulary of a token, which xla alone can put together.
      implementation: None picks the best backend that can run this; a name gets that one or an error.

    Returns:
      (losses_BC in nats, in the dtype of the logits; g_BCO in `dtype`).

    Raises:
      BackendError: (a ValueError) the named implementation cannot run this.
    """
    operands = (logits_BCO, targets_BC, weights_BC)
    options = {"dtype": jnp.dtype(dtype), "is_vocabulary_split": is_vocabulary_split}
    kernels = backend.pick("cross_entropy", BACKENDS, implementation, operands, options)
    return kernels.run(*vary_alike(*operands), dtype=jnp.dtype(dtype))
