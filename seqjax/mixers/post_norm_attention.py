"""Softmax attention in a block with norms after the mixer and the MLP.

    h = x + norm(attention(x));  y = h + norm(MLP(h))

The attention layers of Olmo Hybrid; public implementation: transformers, `models/olmo_hybrid`. Queries and keys are
normalised over all heads. The release has no positions; `position="rope"` gives RoPE. The block reads the residual
stream without a norm.
"""

from typing import Any, Literal

import jax
from flax import nnx

from seqjax.mixers.base import Block, Carry, MakeMixer, make_mlp, make_norm
from seqjax.mixers.transformer_pp import TransformerPP
from seqjax.sharding import constrain_batch
from seqjax.types import Array, Cache, Layer


class PostNormBlock(Block):
    """A residual block with norms of the outputs: mixer and norm, then MLP and norm.

    There is no MLP if `mlp.kind` is none.
    """

    resets = True

    def __init__(self, config: Any, mixer: MakeMixer, layer: Layer, *, rngs: nnx.Rngs):
        super().__init__(config, mixer, layer, rngs=rngs)
        self.norm2 = make_norm(config, rngs=rngs) if config.mlp.kind != "none" else None
        self.mlp = make_mlp(config, layer, rngs=rngs)

    def mixer_input(self, x: Array, dtype: Any) -> Array:
        """Return the residual stream, the mixer's input, in `dtype`."""
        return constrain_batch(x.astype(dtype))

    def _add(self, x: Array, y: Array, dtype: Any) -> Array:
        """Add the mixer's output y and then the MLP's to the residual stream, [B, T, D] or [B, D]."""
        with jax.named_scope("mixer"):
            x = x + self.norm1(constrain_batch(y)).astype(x.dtype)
        if self.norm2 is not None and self.mlp is not None:
            with jax.named_scope("mlp"):
                y = self.mlp(constrain_batch(x.astype(dtype)))
                x = x + self.norm2(constrain_batch(y)).astype(x.dtype)
        return x

    def __call__(self, x_BTD: Array, carry: Carry, *, layer: Array, dtype: Any) -> tuple[Array, Carry]:
        """Apply the layer to the residual stream [B, T, D]."""
        del layer
        with jax.named_scope("mixer"):
            y_BTD, carry = self.apply_mixer(self.mixer_input(x_BTD, dtype), carry)
        return self._add(x_BTD, y_BTD, dtype), carry

    def prefill(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to a prompt and fill an empty cache."""
        del layer
        y_BTD, cache = self.mixer.prefill(self.mixer_input(x_BTD, dtype), cache)
        return self._add(x_BTD, y_BTD, dtype), carry, cache

    def prefill_next(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to T tokens that continue the cached sequence."""
        del layer
        y_BTD, cache = self.mixer.prefill_next(self.mixer_input(x_BTD, dtype), cache)
        return self._add(x_BTD, y_BTD, dtype), carry, cache

    def step(self, x_BD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any) -> tuple[Array, Carry, Cache]:
        """Apply the layer to one token."""
        del layer
        y_BD, cache = self.mixer.step(self.mixer_input(x_BD, dtype), cache)
        return self._add(x_BD, y_BD, dtype), carry, cache


class PostNormAttention(TransformerPP):
    """Causal softmax attention in a post-norm block."""

    block = PostNormBlock
    resets = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; fewer = grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        position: Literal["rope", "none"] = "none",
        rope_base: float = 10_000.0,
        rope_share: float = 1.0,  # of each head's channels, the first, are rotated (partial RoPE)
        # RMSNorm with a learned gain over each head's q and k, before RoPE; "full" = over the q and k of all heads
        qk_norm: bool | Literal["full"] = "full",
        qk_norm_eps: float = 1e-6,
        gate: bool = False,  # multiplies the heads' output by sigmoid(x W), a gate per channel
        window: int | None = None,  # includes the query's own position; None = the whole past
        implementation: Literal["cudnn", "splash", "xla", "chunked"] | None = None,  # None = chosen by device
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position=position,
            rope_base=rope_base,
            rope_share=rope_share,
            qk_norm=qk_norm,
            qk_norm_eps=qk_norm_eps,
            gate=gate,
            rescale_init=False,
            window=window,
            implementation=implementation,
            layer=layer,
            rngs=rngs,
        )
