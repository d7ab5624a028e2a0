"""The parts that the Mambas share: the output's initialiser, the heads, a decay shared by all channels (ablation).

    one:  a_t = exp(-exp(alpha) softplus(u_t . w_a + b_a)),  a scalar per token;   none:  a_t = 1

Only the transition changes, not the input gate (arXiv 2505.18522, section 3; the paper does not give formulas).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.nn.initializers import constant, dt_bias, uniform
from seqjax.nn.params import param
from seqjax.types import Array


def out_init(width: int, n_branches: int) -> Any:
    """Return torch's uniform initialiser, divided by the square root of the number of the model's residual branches."""
    return uniform((width * n_branches) ** -0.5)


def n_heads(dim: int, *, expand: int, head_dim: int) -> int:
    """Return the number of heads in the inner width; raise `UserError` if they do not divide it."""
    if expand * dim % head_dim:
        raise UserError(
            f"head_dim={head_dim} does not divide the inner width {expand * dim} (expand={expand} times "
            f"{base.size(dim=dim)}); choose one that does."
        )
    return expand * dim // head_dim


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
