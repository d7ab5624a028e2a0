"""Attention residuals: every sub-layer reads a softmax mix of earlier outputs instead of their sum.

Sub-layers n = 0, 1, ... are mixer, MLP, mixer, ... With blocks of B sub-layers, the sources of sub-layer n are the
embedding, the sum of the outputs of each completed block, and the sum of the current block's outputs so far:

    h = sum_i p_i s_i,   p = softmax_i(RMSNorm(s_i; gain_n) . query_n)          over the sources s_i
    y = f_n(norm_n(h))

After the last sub-layer, one more mix feeds the model's final norm. Queries start at 0, so all sources have equal
weights at first; gains start at 1. Norms, scores, weights and sums are float32. arXiv 2603.15031; public
implementation: flash-linear-attention, `fla/ops/attnres/naive.py` and `fla/models/transformer/modeling_transformer.py`
(there B is `attnres_block_size`). At 768 x 12, a Transformer++ with B = 4 has 109.6M parameters.

The residual stream x carries the current sum. The completed sources are in `carry`, in an array per block, because XLA
then shares the arrays that a layer does not change. Every layer reads all arrays and masks those that are not filled
yet; how many are filled follows from the layer's index, which may be traced. With `scan_layers=True`, the backward pass
saves all arrays in every layer, so unrolled layers need less memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.config import ModelConfig
from seqjax.mixers.base import Carry, MakeMixer
from seqjax.models.block import PreNormBlock
from seqjax.nn.initializers import constant
from seqjax.nn.layers import LayerNorm, RMSNorm, residual_norm, save_inputs
from seqjax.nn.params import param
from seqjax.sharding import constrain_batch
from seqjax.types import Array, Layer

SOURCES = "sources"  # the entry of `carry`: completed sources, each [B, T, D] or [B, D]


class DepthMix(nnx.Module):
    """A softmax mix of sources with one query for all tokens."""

    def __init__(self, dim: int, *, eps: float, rngs: nnx.Rngs):
        self.eps = eps
        self.query_D = param(rngs, constant(0.0), (dim,), ("embed",))
        self.gain_D = param(rngs, constant(1.0), (dim,), ("embed",))

    def __call__(self, done: tuple[Array, ...], x: Array, n_done: Array | int) -> Array:
        """Return the mix of `x` and the first `n_done` arrays of `done`, all [B, T, D] or [B, D]."""
        return save_inputs(self._mix)(done, x, n_done)

    def _mix(self, done: tuple[Array, ...], x: Array, n_done: Array | int) -> Array:
        sources = [source.astype(jnp.float32) for source in (*done, x)]
        direction_D = self.query_D[...] * self.gain_D[...]
        scores = jnp.stack(
            [jnp.sum(s * direction_D, -1) * jax.lax.rsqrt(jnp.mean(s * s, -1) + self.eps) for s in sources]
        )
        is_source = (jnp.arange(len(sources)) < n_done) | (jnp.arange(len(sources)) == len(done))
        weights = jax.nn.softmax(jnp.where(is_source.reshape(-1, *[1] * (x.ndim - 1)), scores, -jnp.inf), axis=0)
        weighted = [weight[..., None] * s for weight, s in zip(weights, sources, strict=True)]
        return functools.reduce(jnp.add, weighted).astype(x.dtype)


class AttnResidualBlock(PreNormBlock):
    """A pre-norm block whose mixer and MLP read mixes of earlier outputs."""

    def __init__(self, config: ModelConfig, mixer: MakeMixer, layer: Layer, *, rngs: nnx.Rngs):
        super().__init__(config, mixer, layer, rngs=rngs)
        assert config.attn_residual is not None
        self.block_size, self.per_layer = config.attn_residual, 1 if self.mlp is None else 2
        self.n_sources = -(-self.per_layer * config.n_layers // self.block_size)
        mixes = [DepthMix(config.dim, eps=config.norm_eps, rngs=rngs) for _ in range(self.per_layer)]
        self.mix1, self.mix2 = mixes[0], mixes[-1] if self.per_layer == 2 else None

    def init_carry(self, x: Array) -> Carry:
        """Return the sources, none of which is filled."""
        return {SOURCES: (constrain_batch(jnp.zeros_like(x)),) * self.n_sources}

    def _mixed(self, sublayer: int, x: Array, carry: Carry, layer: Array) -> tuple[Array, Array]:
        """Return the input of a sub-layer before its norm, and the sub-layer's index n."""
        n = self.per_layer * layer + sublayer
        mix = self.mix1 if sublayer == 0 else self.mix2
        assert mix is not None
        return mix(carry[SOURCES], x, (n + self.block_size - 1) // self.block_size), n

    def _read(
        self, sublayer: int, norm: RMSNorm | LayerNorm, x: Array, carry: Carry, layer: Array, dtype: Any
    ) -> tuple[Array, Array, Carry]:
        """Return the stream, the normalised mix, and the carry.

        The first sub-layer of a block moves the stream to the sources, after reading it. The stream then restarts at 0.
        """
        h, n = self._mixed(sublayer, x, carry, layer)
        begins = n % self.block_size == 0
        done = tuple(jnp.where(begins & (n // self.block_size == i), x, s) for i, s in enumerate(carry[SOURCES]))
        x = jnp.where(begins, 0, x)
        return x, residual_norm(norm, h, dtype)[1], carry | {SOURCES: done}

    def input_of(self, x: Array, carry: Carry, *, layer: Array) -> Array:
        """Return the mixer's mix of sources."""
        return self._mixed(0, x, carry, layer)[0]
