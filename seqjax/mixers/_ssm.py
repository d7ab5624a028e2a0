"""The shared parts of the Mambas: output initialiser, head count, shared decay.

    one:  a_t = exp(-exp(alpha) softplus(u_t . w_a + b_a)),  a scalar per token;   none:  a_t = 1

The ablation changes only the transition, not the input gate (arXiv 2505.18522, section 3; the paper gives no formulas).
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
    """Return torch's uniform initialiser divided by sqrt(n_branches).

    `n_branches` is the model's number of residual branches.
    """
    return uniform((width * n_branches) ** -0.5)


def n_heads(dim: int, *, expand: int, head_dim: int) -> int:
    """Return the number of heads in the inner width.

    Raises `UserError` if the head width does not divide the inner width.
    """
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
        """Return step sizes softplus(u . w_a + b_a), float32 [B, T].

        `u` is [B, T, width].
        """
        return jax.nn.softplus(u.astype(jnp.float32) @ self.w[...] + self.b[...])

    def __call__(self, u: Array) -> Array:
        """Return the log decay of each token, float32 [B, T].

        `u` is [B, T, width].
        """
        return -jnp.exp(self.alpha[...]) * self.step_size(u)
