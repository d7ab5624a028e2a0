"""Return per-token losses and logit gradients, with interchangeable backends.

With x a token's logits, y its target, w its weight, m = max_o x_o and s = sum_o e^{x_o - m}:

    loss = log s + m - x_y,   g_o = w (e^{x_o - m} / s - [o = y])

`seqjax.ops.cross_entropy` loops over tokens in chunks and needs a chunk's gradient while its logits exist. Its products
for the hidden-state and weight gradients use g directly.
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
    """Return each token's loss and the gradient of the weighted loss sum.

    The losses are unweighted. The op is not differentiable: the gradient is a result, and the Triton kernel has no
    derivative.

    Args:
      logits_BCO: fp32 (fp64 under x64), any vocabulary size.
      targets_BC: each token's target index, in [0, O).
      weights_BC: each loss's factor in the sum, in the logits' dtype; 0 excludes a token.
      dtype: gradient dtype; the products that follow use the same.
      is_vocabulary_split: whether the vocabulary is sharded over devices; then only xla can run.
      implementation: None picks the best backend that can run this; a name selects that backend or raises an error.

    Returns:
      (losses_BC in nats, in the logits' dtype; g_BCO in `dtype`).

    Raises:
      BackendError: (a ValueError) the selected implementation cannot run this.
    """
    operands = (logits_BCO, targets_BC, weights_BC)
    options = {"dtype": jnp.dtype(dtype), "is_vocabulary_split": is_vocabulary_split}
    kernels = backend.pick("cross_entropy", BACKENDS, implementation, operands, options)
    return kernels.run(*vary_alike(*operands), dtype=jnp.dtype(dtype))
