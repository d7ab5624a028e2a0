"""The language model: embed -> scan(block) -> norm -> head, over plain dicts of parameters.

    params = {"embed": [O, D], "blocks": layers stacked on axis 0, "norm": ..., "head": [D, O] unless tied}

A block is pre-norm: x += mixer(norm1(x)); x += mlp(norm2(x)) (arXiv 2505.18522, Appendix A). A mixer file may export
its own `Block` where its architecture differs. `Model` holds structure only; every method takes the parameters.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax import mixers
from seqjax.config import ModelConfig
from seqjax.layers import GPT_INIT, NORMS, Mlp
from seqjax.ops.cross_entropy import cross_entropy
from seqjax.params import Template, param, stacked_axes
from seqjax.sharding import constrain_batch
from seqjax.types import Array, Cache, LayerSpec, Params, PRNGKey

# What the backward pass keeps of a block, by name. "attention" keeps what attention would pay quadratic time to compute
# again (its output, logsumexp and selection); "dots" keeps every matrix product without batch dimensions.
ATTENTION_NAMES = ("attention_out", "attention_lse", "top1_selection")
REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(*ATTENTION_NAMES),
}


class Block(nnx.Module):
    """Pre-norm residual block of a mixer and, unless `mlp.kind` is none, an MLP."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, *, rngs: nnx.Rngs):
        norm = functools.partial(NORMS[config.norm], config.dim, eps=config.norm_eps, rngs=rngs)
        self.norm1 = norm()
        self.mixer = mixers.load(config.mixer.name).Mixer(config.mixer, spec, rngs=rngs)
        has_mlp = config.mlp.kind != "none"
        self.norm2 = norm() if has_mlp else None
        self.mlp = _make_mlp(config, spec, rngs) if has_mlp else None

    def _mlp(self, x: Array, dtype: Any) -> Array:
        if self.norm2 is None or self.mlp is None:
            return x
        return x + self.mlp(self.norm2(x).astype(dtype)).astype(x.dtype)

    def __call__(self, x_BTD: Array, dtype: Any) -> Array:
        """`dtype` is what the mixer and the MLP compute in; the residual stream keeps its own."""
        x_BTD = x_BTD + self.mixer(self.norm1(x_BTD).astype(dtype)).astype(x_BTD.dtype)
        return self._mlp(x_BTD, dtype)

    def prefill(self, x_BTD: Array, cache: Cache, dtype: Any) -> tuple[Array, Cache]:
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
        return self._mlp(x_BTD + y_BTD.astype(x_BTD.dtype), dtype), cache

    def step(self, x_BD: Array, cache: Cache, dtype: Any) -> tuple[Array, Cache]:
        """One token."""
        y_BD, cache = self.mixer.step(self.norm1(x_BD).astype(dtype), cache)
        return self._mlp(x_BD + y_BD.astype(x_BD.dtype), dtype), cache


def _make_mlp(config: ModelConfig, spec: LayerSpec, rngs: nnx.Rngs) -> Mlp:
    return Mlp(
        config.dim,
        config.mlp.dim or default_mlp_dim(config),
        kind=config.mlp.kind,
        n_layers=spec.n_layers,
        bias=config.mlp.bias,
        approximate_gelu=config.mlp.approximate_gelu,
        rngs=rngs,
    )


class Outside(nnx.Module):
    """What is not a layer: embedding, learned positions, final norm, head."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, *, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.dim)
        self.embed = param(rngs, GPT_INIT, shape, ("vocab", "embed"))
        table = (spec.max_len, config.dim)
        learned, tied = config.learned_positions, config.tie_embeddings
        self.positions = param(rngs, GPT_INIT, table, ("positions", "embed")) if learned else None
        self.head = None if tied else param(rngs, GPT_INIT, shape[::-1], ("embed", "vocab"))
        self.norm = NORMS[config.norm](config.dim, eps=config.norm_eps, rngs=rngs)


def default_mlp_dim(config: ModelConfig) -> int:
    """8/3 of the width for gated MLPs, so that they cost what 4 times costs a plain one."""
    return 4 * config.dim if config.mlp.kind == "gelu" else 8 * config.dim // 3


def compute_dtype(config: ModelConfig) -> Any:
    """bfloat16 on accelerators, float32 on CPU, unless the config says which."""
    if config.dtype == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(config.dtype)


class Model:
    """A language model's structure. `max_len` is the training sequence length (tables over positions need it)."""

    def __init__(self, config: ModelConfig, *, max_len: int):
        self.config = config
        self.max_len = max_len
        self.dtype = compute_dtype(config)
        self.residual_dtype = jnp.float32 if config.residual_dtype == "float32" else self.dtype
        module = mixers.load(config.mixer.name)
        block_class = getattr(module, "Block", Block)

        def spec(layer: Any) -> LayerSpec:
            return LayerSpec(config.dim, config.n_layers, layer, max_len)

        self.block = Template(lambda rngs, layer: block_class(config, spec(layer), rngs=rngs))
        self.outside = Template(lambda rngs, layer: Outside(config, spec(layer), rngs=rngs))
        stack = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct((config.n_layers, *x.shape), x.dtype))
        self.shapes: Params = {**self.outside.shapes, "blocks": stack(self.block.shapes)}
        self.axes: Params = {**self.outside.axes, "blocks": stacked_axes(self.block.axes)}

    def init(self, key: PRNGKey) -> Params:
        """Fresh float32 parameters."""
        outside, blocks = jax.random.split(key)
        layers = jnp.arange(self.config.n_layers)
        return {**self.outside.init(outside), "blocks": self.block.init_stacked(blocks, layers)}

    def hidden(self, params: Params, tokens_BT: Array) -> Array:
        """Tokens -> the normalised hidden states that the head reads, [B, T, D]."""

        def apply(layer: Params, x_BTD: Array) -> Array:
            return constrain_batch(self.block.bind(layer)(x_BTD, self.dtype))

        if self.config.remat != "none":
            apply = jax.checkpoint(apply, policy=REMAT[self.config.remat], prevent_cse=not self.config.scan_layers)
        x_BTD = constrain_batch(self._embed(params, tokens_BT))
        if self.config.scan_layers:
            x_BTD, _ = jax.lax.scan(lambda x, layer: (apply(layer, x), None), x_BTD, params["blocks"])
        else:
            for i in range(self.config.n_layers):
                x_BTD = apply(_layer(params["blocks"], i), x_BTD)
        return self._norm(params, x_BTD)

    def loss(self, params: Params, tokens_BT1: Array, weights_B: Array | None = None) -> tuple[Array, Array]:
        """Summed next-token loss (nats) and the number of predicted tokens, of blocks of T + 1 tokens."""
        inputs_BT, targets_BT = tokens_BT1[:, :-1], tokens_BT1[:, 1:]
        weights_BT = jnp.ones(targets_BT.shape, jnp.float32)
        if weights_B is not None:
            weights_BT = weights_BT * weights_B[:, None]
        h_BTD = self.hidden(params, inputs_BT)
        total: Any = cross_entropy(h_BTD, self._head(params), targets_BT, weights_BT, self.config.loss_chunk)
        return total, jnp.sum(weights_BT)

    def logits(self, params: Params, tokens_BT: Array) -> Array:
        """Float32 logits [B, T, O]; for short sequences and tests."""
        return self._logits(params, self.hidden(params, tokens_BT))

    def init_cache(self, batch: int, max_len: int) -> Cache:
        """Empty caches of all layers, stacked."""
        cache = self.block.bind(self.block.shapes).mixer.init_cache(batch, max_len, self.dtype)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.config.n_layers, *x.shape)), cache)

    def prefill(self, params: Params, tokens_BT: Array, cache: Cache) -> tuple[Array, Cache]:
        """A prompt into an empty cache -> float32 logits after its last token [B, O]."""

        def body(x_BTD, layer):
            return self.block.bind(layer[0]).prefill(x_BTD, layer[1], self.dtype)

        x_BTD, cache = jax.lax.scan(body, self._embed(params, tokens_BT), (params["blocks"], cache))
        return self._logits(params, self._norm(params, x_BTD[:, -1])), cache

    def step(self, params: Params, token_B: Array, position: Array, cache: Cache) -> tuple[Array, Cache]:
        """One token at `position` -> float32 logits of the next [B, O]."""

        def body(x_BD, layer):
            return self.block.bind(layer[0]).step(x_BD, layer[1], self.dtype)

        x_BD = self._embed(params, token_B[:, None], position)[:, 0]
        x_BD, cache = jax.lax.scan(body, x_BD, (params["blocks"], cache))
        return self._logits(params, self._norm(params, x_BD)), cache

    def _embed(self, params: Params, tokens_BT: Array, start: Array | int = 0) -> Array:
        x_BTD = params["embed"][tokens_BT]
        if self.config.learned_positions:
            x_BTD = x_BTD + jax.lax.dynamic_slice_in_dim(params["positions"], start, tokens_BT.shape[1])
        return x_BTD.astype(self.residual_dtype)

    def _norm(self, params: Params, x: Array) -> Array:
        outside = {k: v for k, v in params.items() if k != "blocks"}
        return self.outside.bind(outside).norm(x).astype(self.dtype)

    def _head(self, params: Params) -> Array:
        return params["embed"].T if self.config.tie_embeddings else params["head"]

    def _logits(self, params: Params, h: Array) -> Array:
        w_DO = self._head(params).astype(h.dtype)
        return jnp.einsum("...d,do->...o", h, w_DO, preferred_element_type=jnp.float32)


def _layer(stacked: Params, i: int) -> Params:
    return jax.tree.map(lambda x: x[i], stacked)
