"""Based's gated short convolution, "BaseConv" (Arora et al., arXiv 2402.18668; HazyResearch/based).

    [u_1, u_2] = x W_in + b_in;  y = (silu(conv3(u_1)) * u_2) W_out + b_out    each half `expand` times the model width

The convolution has no bias, as in the unfused path of the public code (the fused path has one).
"""

import dataclasses
from typing import Any, NamedTuple

from flax import nnx

from seqjax.mixers import base
from seqjax.nn.initializers import residual_init
from seqjax.nn.layers import Linear
from seqjax.nn.short_conv import ShortConv
from seqjax.types import Array, LayerSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The sizes of the gated convolution; `conv_width` is in tokens."""

    name: str
    expand: int = 2
    conv_width: int = 3

    def check(self, *, dim: int, seq_len: int) -> None:
        """Raise `UserError` where these settings do not fit the model."""
        del dim, seq_len
        base.check_sizes(self, expand=1, conv_width=1)


class ConvCache(NamedTuple):
    """The last inputs of the convolution."""

    past_BWE: Array


class Mixer(base.RecurrentMixer):
    """The gated short convolution of the module's docstring."""

    def __init__(self, config: Config, spec: LayerSpec, *, rngs: nnx.Rngs):
        self.config, self.width = config, config.expand * spec.dim
        self.enter = Linear(spec.dim, self.width, axes=("embed", "mlp"), bias=True, rngs=rngs)
        self.gate = Linear(spec.dim, self.width, axes=("embed", "mlp"), bias=True, rngs=rngs)
        self.conv = ShortConv(self.width, width=config.conv_width, rngs=rngs)
        init = residual_init(spec.n_layers)
        self.out = Linear(self.width, spec.dim, axes=("mlp", "embed"), bias=True, init=init, rngs=rngs)

    def prefill(self, x_BTD: Array, cache: ConvCache) -> tuple[Array, ConvCache]:
        """Apply the parallel form after the tokens that `cache` has seen."""
        y_BTE, past_BWE = self.conv.extend(self.enter(x_BTD), cache.past_BWE)
        return self.out(y_BTE * self.gate(x_BTD)), ConvCache(past_BWE)

    def __call__(self, x_BTD: Array) -> Array:
        """Apply the parallel form from an empty cache."""
        return self.out(self.conv(self.enter(x_BTD)) * self.gate(x_BTD))

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> ConvCache:
        """Return a cache that has seen no token."""
        del max_len
        return ConvCache(self.conv.init_cache(batch, dtype))

    def step(self, x_BD: Array, cache: ConvCache) -> tuple[Array, ConvCache]:
        """Apply the recurrent form to one token."""
        y_BTD, cache = self.prefill(x_BD[:, None], cache)
        return y_BTD[:, 0], cache
