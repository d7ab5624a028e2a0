"""The parts that Mamba-1 and Mamba-2 share: the output's initialiser, and the decay shared by all channels (ablation).

    one:  a_t = exp(-exp(alpha) softplus(u_t . w_a + b_a)),  a scalar per token;   none:  a_t = 1

Only the transition changes, not the input gate (arXiv 2505.18522, section 3; the paper does not give formulas).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.nn.initializers import constant, dt_bias, uniform
from seqjax.nn.params import param
from seqjax.types import Array


def out_init(width: int, n_layers: int) -> Any:
    """Return torch's uniform initialiser, divided by sqrt(L) because each layer has one residual branch."""
    return uniform((width * n_layers) ** -0.5)


class SharedDecay(nnx.Module):
    """One decay per token for all channels."""

    def __init__(self, width: int, *, axis: str, rngs: nnx.Rngs):
        self.w = param(rngs, uniform(width**-0.5), (width,), (axis,))
        self.b = param(rngs, dt_bias, (), ())
        self.alpha = param(rngs, constant(0.0), (), ())

    def step_size(self, u: Array) -> Array:
        """Return the step sizes softplus(u . w_a + b_a), float32 [B, T], of inputs [B, T, width]."""
        return jax.nn.softplus(u.astype(jnp.float32) @ self.w[...] + self.b[...])

    def __call__(self, u: Array) -> Array:
        """Return the log decay of each token, float32 [B, T], from inputs [B, T, width]."""
        return -jnp.exp(self.alpha[...]) * self.step_size(u)
