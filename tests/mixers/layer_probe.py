"""A mixer with a block that reveals its layer index: x -> 2 x + layer + 1."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from seqjax.mixers import base


class Seen(NamedTuple):
    layer: Any


class Block(base.Block):
    def __call__(self, x_BTD, carry, *, layer, dtype):
        return 2 * x_BTD + layer + 1, carry

    def prefill(self, x_BTD, carry, cache, *, layer, dtype):
        return 2 * x_BTD + layer + 1, carry, Seen(layer)

    step = prefill


class LayerProbe(base.Mixer):
    block = Block

    def __init__(self, dim, *, rngs):
        pass

    def __call__(self, x_BTD):
        return x_BTD

    def init_cache(self, batch, max_len, dtype):
        return Seen(jnp.zeros((), jnp.int32))

    def step(self, x_BD, cache):
        return x_BD, cache
