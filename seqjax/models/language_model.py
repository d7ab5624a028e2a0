"""The language model: embed -> scan(block) -> norm -> head, over plain dicts of parameters.

    params = {"embed": [O, D], "blocks": {"0": layers stacked on axis 0}, "norm": ..., "head": [D, O] unless tied}

With `config.pattern`, layers alternate between several mixers: "blocks" then holds one stack per place in the pattern,
and the scan goes over whole patterns. `Model` holds structure only; every method takes the parameters.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from seqjax import mixers
from seqjax.config import ModelConfig
from seqjax.errors import UserError
from seqjax.models.block import Block, Carry, Outside
from seqjax.nn.params import Template, stacked_axes, unstack
from seqjax.ops.cross_entropy import cross_entropy
from seqjax.sharding import constrain_batch
from seqjax.types import Array, Cache, LayerSpec, Params, PRNGKey

# What the backward pass keeps of a block. "attention" keeps what attention would pay quadratic time to compute again
# (its output, logsumexp and selection): our kernels name them, cuDNN's are all that its primitive returns. "dots" keeps
# those and every matrix product without batch dimensions, so that around attention only elementwise work is done twice.
ATTENTION_NAMES = ("attention_out", "attention_lse", "top1_selection")
CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
KEEP_ATTENTION = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(*ATTENTION_NAMES),
    lambda prim, *_, **__: prim.name == CUDNN_ATTENTION,
)
REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": KEEP_ATTENTION,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        KEEP_ATTENTION, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


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
        self.pattern = config.pattern or (config.mixer,)
        self.repeats = config.n_layers // len(self.pattern)

        def spec(layer: Any) -> LayerSpec:
            return LayerSpec(config.dim, config.n_layers, layer, max_len)

        def block(mixer: Any) -> Template:
            make = getattr(mixers.load(mixer.name), "Block", Block)
            return Template(lambda rngs, layer: make(config, mixer, spec(layer), rngs=rngs))

        self.blocks = {str(i): block(mixer) for i, mixer in enumerate(self.pattern)}
        self.outside = Template(lambda rngs, layer: Outside(config, spec(layer), rngs=rngs))
        stack = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct((self.repeats, *x.shape), x.dtype))
        self.shapes: Params = {**self.outside.shapes, "blocks": {i: stack(b.shapes) for i, b in self.blocks.items()}}
        self.axes: Params = {**self.outside.axes, "blocks": {i: stacked_axes(b.axes) for i, b in self.blocks.items()}}

    def init(self, key: PRNGKey) -> Params:
        """Fresh float32 parameters."""
        outside, *keys = jax.random.split(key, 1 + len(self.blocks))
        layers = jnp.arange(self.config.n_layers).reshape(self.repeats, -1).T
        blocks = {
            i: b.init_stacked(k, index) for (i, b), k, index in zip(self.blocks.items(), keys, layers, strict=True)
        }
        return {**self.outside.init(outside), "blocks": blocks}

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have at most, where there are tables over positions; 0 = any number."""
        ends = [getattr(getattr(block, "mixer", None), "longest", 0) for block in self.abstract_blocks()]
        return min((n for n in (*ends, self.max_len * self.config.learned_positions) if n), default=0)

    def _check_length(self, n_tokens: int) -> None:
        if self.longest and n_tokens > self.longest:
            raise UserError(
                f"Sequences of {n_tokens} tokens: this model has a table of {self.longest} positions, as many as it "
                "was trained with (config.train.seq_len). Ask for fewer tokens, or train with longer sequences."
            )

    def abstract_blocks(self) -> list[Any]:
        """One block per place in the pattern, with shapes for parameters; each stands for `repeats` layers."""
        return [block.bind(block.shapes) for block in self.blocks.values()]

    def hidden(self, params: Params, tokens_BT: Array) -> Array:
        """Tokens -> the normalised hidden states that the head reads, [B, T, D]."""
        return self._norm(params, self._layers(params, tokens_BT)[0])

    def entropy(self, params: Params, tokens_BT: Array) -> tuple[Array, Array]:
        """Entropy of the attention weights, each float32 [L, B]: in nats, and as a share of its maximum ln(i + 1).

        Means over the heads and the positions i >= 1 (at 0 there is nothing to choose) of every layer that has one: in
        a hybrid, those with softmax attention (arXiv 2505.18522, section 3). Raises `UserError` where no layer does.
        """
        seq_len = tokens_BT.shape[1]
        if seq_len < 2:
            raise UserError("Entropy needs positions with something to choose: config.train.seq_len of at least 2.")
        largest_T = jnp.log(jnp.arange(2, seq_len + 1, dtype=jnp.float32))

        def measure(block: Any, x_BTD: Array) -> tuple[Array, Array] | None:
            own = getattr(block, "entropy", None)
            e_BTH = own(x_BTD, dtype=self.dtype) if own else None
            if e_BTH is None:
                return None
            e_BT = jnp.mean(e_BTH, axis=-1)[:, 1:]
            return jnp.mean(e_BT, axis=1), jnp.mean(e_BT / largest_T, axis=1)

        seen = [pair for pair in self._layers(params, tokens_BT, measure)[1].values() if pair is not None]
        if not seen:
            names = ", ".join(sorted({mixer.name for mixer in self.pattern}))
            raise UserError(
                f"{names}: no layer has softmax weights over the past, so there is no entropy to measure. Leave "
                "--entropy out and config.eval.entropy_tokens at 0."
            )
        nats_LB, relative_LB = (jnp.concatenate(parts) for parts in zip(*seen, strict=True))
        return nats_LB, relative_LB

    def require_entropy(self) -> None:
        """Raise the `UserError` of `entropy` before anything has run."""
        jax.eval_shape(self.entropy, self.shapes, jax.ShapeDtypeStruct((1, self.max_len), jnp.int32))

    def _layers(
        self, params: Params, tokens_BT: Array, measure: Callable[[Any, Array], Any] = lambda block, x_BTD: None
    ) -> tuple[Array, dict[str, Any]]:
        """The residual stream after all layers, and per place in the pattern what `measure(block, x_BTD)` saw."""

        def apply(block: Template, layer: Params, x_BTD: Array, carry: Carry) -> tuple[Array, Carry]:
            x_BTD, carry = block.bind(layer)(x_BTD, carry, dtype=self.dtype)
            return constrain_batch(x_BTD), carry

        if self.config.remat != "none":
            apply = jax.checkpoint(
                apply, policy=REMAT[self.config.remat], prevent_cse=not self.config.scan_layers, static_argnums=0
            )

        def group(x_and_carry: tuple[Array, Carry], layers: Params) -> tuple[tuple[Array, Carry], dict[str, Any]]:
            seen = {}
            for i, block in self.blocks.items():
                seen[i] = measure(block.bind(layers[i]), x_and_carry[0])
                x_and_carry = apply(block, layers[i], *x_and_carry)
            return x_and_carry, seen

        self._check_length(tokens_BT.shape[1])
        x_BTD = constrain_batch(self._embed(params, tokens_BT))
        x_and_carry = (x_BTD, self._init_carry(x_BTD))
        if self.config.scan_layers:
            (x_BTD, _), seen = jax.lax.scan(group, x_and_carry, params["blocks"])
            return x_BTD, seen
        each = []
        for layers in unstack(params["blocks"], self.repeats):
            x_and_carry, seen = group(x_and_carry, layers)
            each.append(seen)
        return x_and_carry[0], jax.tree.map(lambda *xs: jnp.stack(xs), *each)

    def loss(self, params: Params, tokens_BT1: Array, weights_B: Array | None = None) -> tuple[Array, Array]:
        """Summed next-token loss (nats) and the number of predicted tokens, of blocks of T + 1 tokens."""
        inputs_BT, targets_BT = tokens_BT1[:, :-1], tokens_BT1[:, 1:]
        weights_BT = jnp.ones(targets_BT.shape, jnp.float32)
        if weights_B is not None:
            weights_BT = weights_BT * weights_B[:, None]
        h_BTD = self.hidden(params, inputs_BT)
        with jax.named_scope("loss"):
            total: Any = cross_entropy(h_BTD, self._head(params), targets_BT, weights_BT, self.config.loss_chunk)
        return total, jnp.sum(weights_BT)

    def logits(self, params: Params, tokens_BT: Array) -> Array:
        """Float32 logits [B, T, O]; for short sequences and tests."""
        return self._logits(params, self.hidden(params, tokens_BT))

    def init_cache(self, batch: int, max_len: int) -> Cache:
        """Empty caches of all layers for `max_len` tokens, stacked as the parameters are.

        Raises `UserError` where the model has a table over fewer positions.
        """
        self._check_length(max_len)
        caches = {i: b.bind(b.shapes).init_cache(batch, max_len, self.dtype) for i, b in self.blocks.items()}
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.repeats, *x.shape)), caches)

    def prefill(self, params: Params, tokens_BT: Array, cache: Cache) -> tuple[Array, Cache]:
        """A prompt into an empty cache -> float32 logits after its last token [B, O]."""
        x_BTD, cache = self._decode("prefill", params, self._embed(params, tokens_BT), cache)
        return self._logits(params, self._norm(params, x_BTD[:, -1])), cache

    def step(self, params: Params, token_B: Array, position: Array, cache: Cache) -> tuple[Array, Cache]:
        """One token at `position` -> float32 logits of the next [B, O]."""
        x_BD, cache = self._decode("step", params, self._embed(params, token_B[:, None], position)[:, 0], cache)
        return self._logits(params, self._norm(params, x_BD)), cache

    def _decode(self, method: str, params: Params, x: Array, cache: Cache) -> tuple[Array, Cache]:
        """`prefill` of [B, T, D] or `step` of [B, D] through all layers."""

        def group(x_and_carry, layers_and_caches):
            (x, carry), (layers, caches) = x_and_carry, layers_and_caches
            new = {}
            for i, block in self.blocks.items():
                x, carry, new[i] = getattr(block.bind(layers[i]), method)(x, carry, caches[i], dtype=self.dtype)
            return (x, carry), new

        (x, _), cache = jax.lax.scan(group, (x, self._init_carry(x)), (params["blocks"], cache))
        return x, cache

    def _init_carry(self, x: Array) -> Carry:
        carry: Carry = {}
        for block in self.abstract_blocks():
            carry |= block.init_carry(x)
        return carry

    def _embed(self, params: Params, tokens_BT: Array, start: Array | int = 0) -> Array:
        x_BTD = params["embed"][tokens_BT]
        if self.config.embed_norm:
            x_BTD = self._outside(params).embed_norm(x_BTD)
        if self.config.learned_positions:
            x_BTD = x_BTD + jax.lax.dynamic_slice_in_dim(params["positions"], start, tokens_BT.shape[1])
        return x_BTD.astype(self.residual_dtype)

    def _outside(self, params: Params) -> Any:
        return self.outside.bind({k: v for k, v in params.items() if k != "blocks"})

    def _norm(self, params: Params, x: Array) -> Array:
        return self._outside(params).norm(x).astype(self.dtype)

    def _head(self, params: Params) -> Array:
        return params["embed"].T if self.config.tie_embeddings else params["head"]

    def _logits(self, params: Params, h: Array) -> Array:
        w_DO = self._head(params).astype(h.dtype)
        return jnp.einsum("...d,do->...o", h, w_DO, preferred_element_type=jnp.float32)
