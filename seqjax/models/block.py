"""What a model is made of beside its mixers: the pre-norm block, and everything outside the layers.

A block is x += mixer(norm1(x)); x += mlp(norm2(x)) (arXiv 2505.18522, Appendix A). A mixer file may export its own
`Block` where its architecture differs; it takes what this one takes.

`carry` is what a block hands to later blocks beside the residual stream (RWKV-7: the first layer's values). It is a
dict that starts as the union of what the blocks' `init_carry` give; a block returns it whole, changed or not.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax import mixers
from seqjax.config import ModelConfig
from seqjax.nn.layers import GPT_INIT, NORMS, Mlp, residual_init
from seqjax.nn.params import Init, param
from seqjax.types import Array, Cache, LayerSpec

Carry = dict[str, Any]


class Block(nnx.Module):
    """Pre-norm residual block of a mixer and, unless `mlp.kind` is none, an MLP. `mixer` is the mixer's config."""

    def __init__(self, config: ModelConfig, mixer: Any, spec: LayerSpec, *, rngs: nnx.Rngs):
        norm = functools.partial(NORMS[config.norm], config.dim, eps=config.norm_eps, rngs=rngs)
        self.norm1 = norm()
        self.mixer = mixers.load(mixer.name).Mixer(mixer, spec, rngs=rngs)
        has_mlp = config.mlp.kind != "none"
        self.norm2 = norm() if has_mlp else None
        self.mlp = _make_mlp(config, spec, rngs) if has_mlp else None

    def _mlp(self, x: Array, dtype: Any) -> Array:
        if self.norm2 is None or self.mlp is None:
            return x
        with jax.named_scope("mlp"):  # names in profiles (benchmarks.profile_step)
            return x + self.mlp(self.norm2(x).astype(dtype)).astype(x.dtype)

    def init_carry(self, x: Array) -> Carry:
        """What this block expects in `carry`, from the embeddings [B, T, D] or [B, D]; most expect nothing."""
        del x
        return {}

    def __call__(self, x_BTD: Array, carry: Carry, *, dtype: Any) -> tuple[Array, Carry]:
        """`dtype` is what the mixer and the MLP compute in; the residual stream keeps its own."""
        with jax.named_scope("mixer"):
            x_BTD = x_BTD + self.mixer(self.norm1(x_BTD).astype(dtype)).astype(x_BTD.dtype)
        return self._mlp(x_BTD, dtype), carry

    def entropy(self, x_BTD: Array, *, dtype: Any) -> Array | None:
        """Entropy of the mixer's weights in nats, float32 [B, T, H]; None where it has none."""
        own = getattr(self.mixer, "entropy", None)
        return own(self.norm1(x_BTD).astype(dtype)) if own else None

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Cache:
        """An empty cache for `prefill` and `step`."""
        return self.mixer.init_cache(batch, max_len, dtype)

    def prefill(self, x_BTD: Array, carry: Carry, cache: Cache, *, dtype: Any) -> tuple[Array, Carry, Cache]:
        """A prompt into an empty cache: in parallel where the mixer can, else token by token."""
        h_BTD = self.norm1(x_BTD).astype(dtype)
        if hasattr(self.mixer, "prefill"):
            y_BTD, cache = self.mixer.prefill(h_BTD, cache)
        else:

            def body(cache, h_BD):
                y_BD, cache = self.mixer.step(h_BD, cache)
                return cache, y_BD

            cache, y_TBD = jax.lax.scan(body, cache, jnp.moveaxis(h_BTD, 1, 0))
            y_BTD = jnp.moveaxis(y_TBD, 0, 1)
        return self._mlp(x_BTD + y_BTD.astype(x_BTD.dtype), dtype), carry, cache

    def step(self, x_BD: Array, carry: Carry, cache: Cache, *, dtype: Any) -> tuple[Array, Carry, Cache]:
        """One token."""
        y_BD, cache = self.mixer.step(self.norm1(x_BD).astype(dtype), cache)
        return self._mlp(x_BD + y_BD.astype(x_BD.dtype), dtype), carry, cache

    def flops_per_token(self, seq_len: int) -> float:
        """Forward, beside the products with parameters."""
        return self.mixer.flops_per_token(seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """Forward and backward, beside the products with parameters."""
        own = getattr(self.mixer, "train_flops_per_token", None)
        return own(seq_len) if own else 3 * self.mixer.flops_per_token(seq_len)

    def state_size(self, seq_len: int) -> int:
        """Elements of the decode cache per sequence."""
        return self.mixer.state_size(seq_len)


def _make_mlp(config: ModelConfig, spec: LayerSpec, rngs: nnx.Rngs) -> Mlp:
    return Mlp(
        config.dim,
        config.mlp.dim or default_mlp_dim(config),
        kind=config.mlp.kind,
        down_init=residual_init(spec.n_layers) if config.mlp.rescale_init else GPT_INIT,
        bias=config.mlp.bias,
        approximate_gelu=config.mlp.approximate_gelu,
        rngs=rngs,
    )


def default_mlp_dim(config: ModelConfig) -> int:
    """8/3 of the width for gated MLPs, so that they cost what 4 times costs a plain one."""
    return 4 * config.dim if config.mlp.kind == "gelu" else 8 * config.dim // 3


class Outside(nnx.Module):
    """What is not a layer: embedding, its norm, learned positions, final norm, head."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, *, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.dim)
        table = (spec.max_len, config.dim)
        learned, tied = config.learned_positions, config.tie_embeddings
        embed, head = _outside_init(config)
        norm = functools.partial(NORMS[config.norm], config.dim, eps=config.norm_eps, rngs=rngs)
        self.embed = param(rngs, embed, shape, ("vocab", "embed"))
        self.embed_norm = norm() if config.embed_norm else None
        self.positions = param(rngs, GPT_INIT, table, ("positions", "embed")) if learned else None
        self.head = None if tied else param(rngs, head, shape[::-1], ("embed", "vocab"))
        self.norm = norm()


def _outside_init(config: ModelConfig) -> tuple[Init, Init]:
    """Of the embedding and the head. RWKV's tiny embedding needs its norm and its own head."""
    if config.init == "gpt" or config.tie_embeddings:
        return GPT_INIT, GPT_INIT
    scale = 0.5 * math.sqrt(max(1.0, config.vocab_size / config.dim))
    return (
        lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -1e-4, 1e-4),
        jax.nn.initializers.orthogonal(scale),
    )
