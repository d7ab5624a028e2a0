"""The block of most architectures: x += mixer(norm1(x)); x += mlp(norm2(x)) (arXiv 2505.18522, Appendix A)."""

from typing import Any

import jax
from flax import nnx

from seqjax.config import ModelConfig
from seqjax.mixers.base import Block, Carry, MakeMixer, make_norm
from seqjax.nn.initializers import GPT_INIT, residual_init
from seqjax.nn.layers import Mlp
from seqjax.sharding import constrain_batch
from seqjax.types import Array, Cache, Layer


class PreNormBlock(Block):
    """The residual block of a norm and a mixer and, unless `mlp.kind` is none, a norm and an MLP."""

    def __init__(self, config: ModelConfig, mixer: MakeMixer, layer: Layer, *, rngs: nnx.Rngs):
        super().__init__(config, mixer, layer, rngs=rngs)
        has_mlp = config.mlp.kind != "none"
        self.norm2 = make_norm(config, rngs=rngs) if has_mlp else None
        self.mlp = _make_mlp(config, layer, rngs=rngs) if has_mlp else None

    def __call__(self, x_BTD: Array, carry: Carry, *, layer: Array, dtype: Any) -> tuple[Array, Carry]:
        """Apply the layer to the residual stream [B, T, D]."""
        del layer
        with jax.named_scope("mixer"):
            x_BTD = x_BTD + constrain_batch(self.mixer(self.mixer_input(x_BTD, dtype))).astype(x_BTD.dtype)
        return self._add_mlp(x_BTD, dtype), carry

    def prefill(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to a prompt and fill an empty cache."""
        del layer
        y_BTD, cache = self.mixer.prefill(self.mixer_input(x_BTD, dtype), cache)
        return self._add_mlp(x_BTD + constrain_batch(y_BTD).astype(x_BTD.dtype), dtype), carry, cache

    def prefill_next(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to T tokens after those that `cache` has seen."""
        del layer
        y_BTD, cache = self.mixer.prefill_next(self.mixer_input(x_BTD, dtype), cache)
        return self._add_mlp(x_BTD + constrain_batch(y_BTD).astype(x_BTD.dtype), dtype), carry, cache

    def step(self, x_BD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any) -> tuple[Array, Carry, Cache]:
        """Apply the layer to one token."""
        del layer
        y_BD, cache = self.mixer.step(self.mixer_input(x_BD, dtype), cache)
        return self._add_mlp(x_BD + constrain_batch(y_BD).astype(x_BD.dtype), dtype), carry, cache

    def _add_mlp(self, x: Array, dtype: Any) -> Array:
        if self.norm2 is None or self.mlp is None:
            return x
        with jax.named_scope("mlp"):  # the name in profiles (benchmarks.profile_step)
            return x + constrain_batch(self.mlp(constrain_batch(self.norm2(x).astype(dtype)))).astype(x.dtype)


def _make_mlp(config: ModelConfig, layer: Layer, *, rngs: nnx.Rngs) -> Mlp:
    return Mlp(
        config.dim,
        config.mlp.dim or default_mlp_dim(config),
        kind=config.mlp.kind,
        down_init=residual_init(layer.n_layers) if config.mlp.rescale_init else GPT_INIT,
        bias=config.mlp.bias,
        approximate_gelu=config.mlp.approximate_gelu,
        rngs=rngs,
    )


def default_mlp_dim(config: ModelConfig) -> int:
    """Return the default inner width: 4 D for a plain MLP, and 8/3 D for a gated one, which has the same cost."""
    return 4 * config.dim if config.mlp.kind == "gelu" else 8 * config.dim // 3
