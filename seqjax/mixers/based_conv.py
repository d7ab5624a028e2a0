"""Based's gated short convolution, "BaseConv" (Arora et al., arXiv 2402.18668).

    [u_1, u_2] = x W_in + b_in;  y = (silu(conv3(u_1)) * u_2) W_out + b_out    each half `expand` times the model width

Public implementation: HazyResearch/based. The convolution has no bias, as in the unfused path of the public code (the
fused path has a bias).
"""

from typing import Any, NamedTuple

from flax import nnx

from seqjax.mixers import base
from seqjax.nn.initializers import residual_init
from seqjax.nn.layers import Linear
from seqjax.nn.short_conv import ShortConv
from seqjax.types import Array, Layer


class ConvCache(NamedTuple):
    """The last inputs of the convolution."""

    past_BWE: Array


class BasedConv(base.RecurrentMixer):
    """The gated short convolution; see the module docstring."""

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        conv_width: int = 3,  # in tokens
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        base.at_least(1, expand=expand, conv_width=conv_width)
        width = expand * dim
        self.enter = Linear(dim, width, axes=("embed", "mlp"), bias=True, rngs=rngs)
        self.gate = Linear(dim, width, axes=("embed", "mlp"), bias=True, rngs=rngs)
        self.conv = ShortConv(width, width=conv_width, rngs=rngs)
        init = residual_init(layer.n_layers)
        self.out = Linear(width, dim, axes=("mlp", "embed"), bias=True, init=init, rngs=rngs)

    def prefill(self, x_BTD: Array, cache: ConvCache) -> tuple[Array, ConvCache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        y_BTE, past_BWE = self.conv.extend(self.enter(x_BTD), cache.past_BWE)
        return self.out(y_BTE * self.gate(x_BTD)), ConvCache(past_BWE)

    def __call__(self, x_BTD: Array) -> Array:
        """Apply the parallel form from an empty cache."""
        return self.out(self.conv(self.enter(x_BTD)) * self.gate(x_BTD))

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> ConvCache:
        """Return an empty cache."""
        del max_len
        return ConvCache(self.conv.init_cache(batch, dtype))

    def step(self, x_BD: Array, cache: ConvCache) -> tuple[Array, ConvCache]:
        """Apply the recurrent form to one token."""
        y_BTD, cache = self.prefill(x_BD[:, None], cache)
        return y_BTD[:, 0], cache
