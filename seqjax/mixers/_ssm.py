"""What Mamba-1 and Mamba-2 share: the step size's bias, and the decay that every channel shares (ablation).

    one:  a_t = exp(-exp(alpha) softplus(u_t . w_a + b_a)),  a scalar per token;   none:  a_t = 1

Only the transition changes, the input gate does not (arXiv 2505.18522, section 3; the definitions are ours).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.nn.layers import constant, uniform
from seqjax.nn.params import param
from seqjax.types import Array


def dt_bias(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Initialiser: softplus of it is log-uniform in 0.001 to 0.1."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1)))
    dt = jnp.maximum(dt, 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))


def out_init(width: int, n_layers: int) -> Any:
    """Torch's uniform, divided by sqrt(L): one residual branch per layer."""
    return uniform((width * n_layers) ** -0.5)


class SharedDecay(nnx.Module):
    """One decay per token for all channels: u [B, T, U] -> log a [B, T], float32."""

    def __init__(self, width: int, *, axis: str, rngs: nnx.Rngs):
        self.w = param(rngs, uniform(width**-0.5), (width,), (axis,))
        self.b = param(rngs, dt_bias, (), ())
        self.alpha = param(rngs, constant(0.0), (), ())

    def step_size(self, u_BTU: Array) -> Array:
        """The softplus, [B, T]."""
        return jax.nn.softplus(u_BTU.astype(jnp.float32) @ self.w[...] + self.b[...])

    def __call__(self, u_BTU: Array) -> Array:
        """Log decay of each token."""
        return -jnp.exp(self.alpha[...]) * self.step_size(u_BTU)


def check_sizes(config: Any, **least: int) -> None:
    """Raise `UserError` for a setting below its least value."""
    for name, low in least.items():
        if getattr(config, name) < low:
            raise UserError(f"config.model.mixer.{name} must be at least {low}, not {getattr(config, name)}.")


def check_choice(config: Any, name: str, known: tuple[str, ...]) -> None:
    """Raise `UserError` for a setting that is not one of `known`."""
    if getattr(config, name) not in known:
        raise UserError(f"config.model.mixer.{name}={getattr(config, name)!r} must be one of {', '.join(known)}.")
