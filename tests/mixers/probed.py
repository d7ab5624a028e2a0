"""A small mixer with an auxiliary loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from seqjax.mixers import base
from seqjax.nn import Linear, auxiliary


class Sum(NamedTuple):
    total_BD: jax.Array


class Probed(base.Mixer):
    """A decaying sum h_t = h_{t-1} / 2 + x_t U, halved where a probe of x_t is negative; y_t = h_t W.

    The auxiliary loss trains the probe to predict the mean channel of h_t. No gradient flows through the halving.
    """

    def __init__(self, dim, *, scale: float = 1.0, rngs):
        self.dim, self.scale = dim, scale
        self.up = Linear(dim, dim, axes=("embed", "heads"), rngs=rngs)
        self.out = Linear(dim, dim, axes=("heads", "embed"), rngs=rngs)
        self.probe = auxiliary(Linear(dim, 1, axes=("embed", None), bias=True, rngs=rngs))

    def guess(self, x):
        return self.probe(jax.lax.stop_gradient(x)).astype(jnp.float32)

    def target(self, h):
        return jax.lax.stop_gradient(h).astype(jnp.float32).mean(-1, keepdims=True)

    def read(self, x, h):
        return self.out(jnp.where(self.guess(x) > 0, h, 0.5 * h))

    def call_with_loss(self, x_BTD):
        def combine(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        u_BTD = self.up(x_BTD)
        _, h_BTD = jax.lax.associative_scan(combine, (jnp.full_like(u_BTD, 0.5), u_BTD), axis=1)
        return self.read(x_BTD, h_BTD), self.scale * jnp.mean((self.guess(x_BTD) - self.target(h_BTD)) ** 2)

    def __call__(self, x_BTD):
        return self.call_with_loss(x_BTD)[0]

    def init_cache(self, batch, max_len, dtype):
        return Sum(jnp.zeros((batch, self.dim), dtype))

    def step(self, x_BD, cache):
        total_BD = 0.5 * cache.total_BD + self.up(x_BD)
        return self.read(x_BD, total_BD), Sum(total_BD)

    def flops_per_token(self, seq_len):
        return 3.0 * self.dim
