"""The language model: embed -> blocks -> norm -> head, over parameter dicts.

    params = {"embed": [O, D], "blocks": {"0": layers stacked on axis 0}, "norm": ..., "head": [D, O] unless tied}

With several mixers, the layers alternate between them: "blocks" then holds one stack per position in the pattern, and
the scan runs over whole patterns. `Model` holds only the structure; every method takes the parameters.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from seqjax import mixers
from seqjax.config import ModelConfig
from seqjax.errors import UserError
from seqjax.mixers.base import AUXILIARY_LOSS, SEGMENTS, Block, Carry
from seqjax.models.attn_residual import SOURCES, AttnResidualBlock
from seqjax.models.block import PreNormBlock
from seqjax.models.embedder import Embedder
from seqjax.models.remat import rematerialize
from seqjax.nn.params import Template, stacked_axes, unstack
from seqjax.ops.cross_entropy import (
    cross_entropy,
    marked_scores,
    sequence_losses,
    token_losses,
    weighted_sequence_losses,
)
from seqjax.ops.documents import document_numbers, document_positions
from seqjax.sharding import constrain_batch
from seqjax.types import Array, Cache, Layer, Params, PRNGKey, require_array

# The residual stream, and the carry that blocks pass to later blocks.
State = tuple[Array, Carry]


def compute_dtype(config: ModelConfig) -> Any:
    """Return the compute dtype.

    By default it is bfloat16 on accelerators and float32 on a CPU.
    """
    if config.dtype == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(config.dtype)


def _at(h_BTD: Array, positions_BA: Array | None) -> Array:
    """Return the hidden states at positions [B, A], or all for None."""
    return h_BTD if positions_BA is None else jnp.take_along_axis(h_BTD, positions_BA[..., None], 1)


def _first_like(block: type[Block], pattern: Sequence[type[Block]]) -> int:
    """Return the index of the first block with the same `init_carry`.

    These blocks carry the same arrays to later layers.
    """
    return next(i for i, kind in enumerate(pattern) if kind.init_carry is block.init_carry)


class Model:
    """The structure of a language model.

    `max_len` is the training sequence length, which sizes position tables. `carry_from_zero` is for models trained when
    only layer 0 could set the arrays that RWKV-7 blocks carry. In a hybrid with another block in layer 0, these arrays
    then stay zero. `documents` are the ids (BOS, EOS) that begin and end a document (config.data.reset): states and
    positions then restart at each BOS after an EOS, and nothing crosses this boundary. None means no restart. Decoding
    never restarts, because a cache holds one document.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_len: int,
        carry_from_zero: bool = False,
        documents: tuple[int, int] | None = None,
    ):
        self.config, self.documents = config, documents
        self.max_len = max_len
        self.dtype = compute_dtype(config)
        self.residual_dtype = jnp.float32 if config.residual_dtype == "float32" else self.dtype
        self.pattern = config.mixers
        self.repeats = config.n_layers // len(self.pattern)

        usual = AttnResidualBlock if config.attn_residual else PreNormBlock
        kinds = [mixers.load(mixer.name).block or usual for mixer in self.pattern]
        self.blocks = {
            str(i): self._block_template(block, mixer, first=0 if carry_from_zero else _first_like(block, kinds))
            for i, (block, mixer) in enumerate(zip(kinds, self.pattern, strict=True))
        }
        self.embedder = Template(lambda rngs, layer: Embedder(config, max_len=max_len, rngs=rngs))
        stack = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct((self.repeats, *x.shape), x.dtype))
        self.shapes: Params = {**self.embedder.shapes, "blocks": {i: stack(b.shapes) for i, b in self.blocks.items()}}
        self.axes: Params = {**self.embedder.axes, "blocks": {i: stacked_axes(b.axes) for i, b in self.blocks.items()}}
        # The group of each parameter, for the optimiser (`seqjax.nn.param`).
        self.groups: Params = {**self.embedder.groups, "blocks": {i: b.groups for i, b in self.blocks.items()}}
        # The names of the losses that training adds to the language loss.
        self.auxiliary_losses = (AUXILIARY_LOSS,) if any(b.mixer.has_loss for b in self.abstract_blocks()) else ()

    def _block_template(self, block: type[Block], mixer_config: Any, *, first: int) -> Template:
        config, max_len = self.config, self.max_len

        def build(rngs: Any, index: Any) -> Block:
            layer = Layer(index, config.n_layers, max_len, first)
            mixer = functools.partial(mixers.build, mixer_config, config.dim, layer=layer)
            return block(config, mixer, layer, rngs=rngs)

        return Template(build)

    def init(self, key: PRNGKey) -> Params:
        """Return fresh float32 parameters."""
        embedder_key, *keys = jax.random.split(key, 1 + len(self.blocks))
        layers = jnp.arange(self.config.n_layers).reshape(self.repeats, -1).T
        blocks = {
            i: b.init_stacked(k, index) for (i, b), k, index in zip(self.blocks.items(), keys, layers, strict=True)
        }
        return {**self.embedder.init(embedder_key), "blocks": blocks}

    @property
    def longest(self) -> int:
        """The longest sequence in tokens, set by position tables; 0 means no limit."""
        lengths = [block.longest for block in self.abstract_blocks()]
        return min((n for n in (*lengths, self.max_len * self.config.learned_positions) if n), default=0)

    def check_length(self, n_tokens: int) -> None:
        """Raise `UserError` for more tokens than a position table has."""
        if self.longest and n_tokens > self.longest:
            raise UserError(
                f"Sequences of {n_tokens} tokens: the model has a table of {self.longest} positions, its training "
                "length (config.train.seq_len). Use fewer tokens, or train with longer sequences."
            )

    def abstract_blocks(self) -> list[Block]:
        """Return one block per position in the pattern, with shapes as parameters.

        Each represents `repeats` layers.
        """
        return [block.bind(block.shapes) for block in self.blocks.values()]

    # ------------------------------------------------------------------------------------------- the parallel form
    def logits(self, params: Params, tokens_BT: Array, positions_BA: Array | None = None) -> Array:
        """Return the float32 logits [B, T, O] of int32 tokens [B, T].

        Meant for short sequences and tests. With `positions_BA`, int32, only the logits at these positions, [B, A, O].
        """
        return self._embedder(params).decode(_at(self.hidden(params, tokens_BT), positions_BA))

    def sequence_losses(self, params: Params, tokens_BT1: Array) -> Array:
        """Return each block's summed next-token loss in nats, float32 [B].

        A block has T + 1 tokens. For evaluation.
        """
        require_array("tokens_BT1", tokens_BT1, "B, T + 1", integer=True)
        h_BTD, head_DO = self.hidden(params, tokens_BT1[:, :-1]), self._embedder(params).unembedding
        with jax.named_scope("loss"):
            return sequence_losses(h_BTD, head_DO, tokens_BT1[:, 1:], self.config.loss_chunk)

    def weighted_sequence_losses(self, params: Params, tokens_BT1: Array, weights_BT: Array) -> tuple[Array, Array]:
        """Return `sequence_losses` and the same sums with token weights.

        Both are float32 [B].
        """
        require_array("tokens_BT1", tokens_BT1, "B, T + 1", integer=True)
        h_BTD, head_DO = self.hidden(params, tokens_BT1[:, :-1]), self._embedder(params).unembedding
        with jax.named_scope("loss"):
            chunk = self.config.loss_chunk
            return weighted_sequence_losses(h_BTD, head_DO, tokens_BT1[:, 1:], weights_BT, chunk)

    def token_losses(self, params: Params, tokens_BT1: Array) -> Array:
        """Return each predicted token's loss in nats, float32 [B, T].

        A block has T + 1 tokens.
        """
        require_array("tokens_BT1", tokens_BT1, "B, T + 1", integer=True)
        h_BTD, head_DO = self.hidden(params, tokens_BT1[:, :-1]), self._embedder(params).unembedding
        with jax.named_scope("loss"):
            return token_losses(h_BTD, head_DO, tokens_BT1[:, 1:], self.config.loss_chunk)

    def loss(self, params: Params, tokens_BT1: Array, weights_BT: Array | None = None) -> tuple[Array, Array]:
        """Return the summed next-token loss in nats and the number of predicted tokens.

        A block has T + 1 tokens. With `weights_BT`, float32, return the weighted sum and the sum of the weights.
        """
        require_array("tokens_BT1", tokens_BT1, "B, T + 1", integer=True)
        return self.target_loss(params, tokens_BT1[:, :-1], tokens_BT1[:, 1:], weights_BT)

    def target_loss(
        self,
        params: Params,
        inputs_BT: Array,
        targets_BT: Array,
        weights_BT: Array | None = None,
        *,
        positions_BA: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return `loss` for targets int32 [B, T] that need not be the next inputs.

        A target with weight 0 may be any id. With `positions_BA`, int32, targets and weights are [B, A] and belong to
        these positions; no logits are computed elsewhere.
        """
        return self._losses(params, inputs_BT, targets_BT, weights_BT, positions_BA, training=False)[:2]

    def training_loss(
        self,
        params: Params,
        inputs_BT: Array,
        targets_BT: Array,
        weights_BT: Array | None = None,
        *,
        positions_BA: Array | None = None,
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Return `target_loss` and the auxiliary losses by name, in nats.

        An auxiliary loss is a mean over tokens, summed over layers (`Mixer.call_with_loss`); most models have none. The
        training objective is the mean target loss plus the auxiliary losses.
        """
        return self._losses(params, inputs_BT, targets_BT, weights_BT, positions_BA, training=True)

    def _losses(
        self,
        params: Params,
        inputs_BT: Array,
        targets_BT: Array,
        weights_BT: Array | None,
        positions_BA: Array | None,
        *,
        training: bool,
    ) -> tuple[Array, Array, dict[str, Array]]:
        if weights_BT is None:
            weights_BT = jnp.ones(targets_BT.shape, jnp.float32)
        elif jnp.shape(weights_BT) != targets_BT.shape:
            raise ValueError(f"weights_BT has the shape {jnp.shape(weights_BT)} instead of {targets_BT.shape}.")
        embedder = self._embedder(params)
        embed_NOD = embedder.copies(inputs_BT) if positions_BA is None else None
        x_BTD, carry = self.initial_state(params, inputs_BT, embed_NOD=embed_NOD)
        auxiliary = dict.fromkeys(self.auxiliary_losses if training else (), jnp.zeros((), jnp.float32))
        h_BTD, carry = self._hidden(params, (x_BTD, carry | auxiliary))
        h_BAD, head_DO = _at(h_BTD, positions_BA), embedder.unembedding
        with jax.named_scope("loss"):
            total = cross_entropy(
                h_BAD,
                head_DO,
                targets_BT,
                weights_BT,
                self.config.loss_chunk,
                embed_NOD,
                implementation=self.config.loss_implementation,
            )
        return total, jnp.sum(weights_BT), {name: carry[name] for name in auxiliary}

    def continuation_scores(
        self, params: Params, tokens_BT: Array, marks_BT: Array, last_B: Array, candidates_BC: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Score continuations that end at `last_B` and may differ in their last token.

        Args:
            params: The parameters.
            tokens_BT: Texts without the last token, int32 [B, T]; tokens after `last_B` are padding.
            marks_BT: 1 if the next token belongs to the continuation, float32 [B, T]; 0 from `last_B` on.
            last_B: Position of each text's last token, int32.
            candidates_BC: Candidate tokens at the next position, int32.

        Returns, in float32 and nats: the summed log-probability of the marked tokens [B], how many marked tokens are
        not the most likely [B], each candidate's log-probability [B, C], and the most likely next token, int32 [B].
        """
        h_BTD, embedder = self.hidden(params, tokens_BT), self._embedder(params)
        last_BD = jnp.take_along_axis(h_BTD, last_B[:, None, None], axis=1)[:, 0]
        log_p_BO = jax.nn.log_softmax(embedder.decode(last_BD), axis=-1)
        targets_BT = jnp.roll(tokens_BT, -1, axis=1)
        marked_B, missed_B = marked_scores(h_BTD, embedder.unembedding, targets_BT, marks_BT, self.config.loss_chunk)
        best_B = jnp.argmax(log_p_BO, axis=-1).astype(jnp.int32)
        return marked_B, missed_B, jnp.take_along_axis(log_p_BO, candidates_BC, axis=1), best_B

    def hidden(self, params: Params, tokens_BT: Array) -> Array:
        """Return the final normalised hidden states [B, T, D], the head's input."""
        return self._hidden(params, self.initial_state(params, tokens_BT))[0]

    def _hidden(self, params: Params, state: State) -> State:
        """Return the final normalised hidden states [B, T, D] and the final carry."""
        apply = rematerialize(self._apply_block, self.config.remat, in_scan=self.config.scan_layers)

        def group(state: State, layers: Params, first_layer: Array) -> tuple[State, None]:
            for i, (slot, template) in enumerate(self.blocks.items()):
                state = apply(template, layers[slot], *state, first_layer + i)
            return state, None

        (x_BTD, carry), _ = self.over_layers(group, state, params["blocks"])
        return self._normalize(params, self._final_stream(params, x_BTD, carry)), carry

    def initial_state(self, params: Params, tokens_BT: Array, *, embed_NOD: Array | None = None) -> State:
        """Return the first block's input: embeddings [B, T, D] and initial carry."""
        require_array("tokens_BT", tokens_BT, "B, T", integer=True)
        self.check_length(tokens_BT.shape[1])
        if self.documents is None:
            x_BTD = constrain_batch(self.embed(params, tokens_BT, embed_NOD=embed_NOD))
            return x_BTD, self._init_carry(x_BTD)
        segments_BT = document_numbers(tokens_BT, *self.documents)
        positions_BT = document_positions(segments_BT)
        x_BTD = constrain_batch(self.embed(params, tokens_BT, positions_BT=positions_BT, embed_NOD=embed_NOD))
        return x_BTD, self._init_carry(x_BTD) | {SEGMENTS: segments_BT}

    def over_layers(
        self, body: Callable[[State, Params, Array], tuple[State, Any]], state: State, blocks: Params
    ) -> tuple[State, Any]:
        """Run `body(state, layers, first_layer) -> (state, out)` per group of layers.

        A group is one repeat of the pattern: `layers` holds one layer per position in it, and `first_layer` is the
        index of the first. The `out` values are returned stacked. The loop is a scan or, with `scan_layers=False`,
        unrolled.
        """
        per_group = len(self.pattern)
        if self.config.scan_layers:
            first_layers = jnp.arange(0, self.config.n_layers, per_group, dtype=jnp.int32)
            return jax.lax.scan(lambda state, xs: body(state, *xs), state, (blocks, first_layers))
        outs = []
        for i, layers in enumerate(unstack(blocks, self.repeats)):
            state, out = body(state, layers, jnp.int32(i * per_group))
            outs.append(out)
        return state, jax.tree.map(lambda *xs: jnp.stack(xs), *outs)

    def _apply_block(self, template: Template, params: Params, x_BTD: Array, carry: Carry, layer: Array) -> State:
        block, before = template.bind(params), carry.get(AUXILIARY_LOSS)
        x_BTD, carry = block(x_BTD, carry, layer=layer, dtype=self.dtype)
        if before is not None and block.mixer.has_loss and carry.get(AUXILIARY_LOSS, before) is before:
            raise UserError(
                f"{type(block).__name__} drops the auxiliary loss of {type(block.mixer).__name__}. Call "
                "self.apply_mixer(h_BTD, carry) in the block, and return its carry."
            )
        return constrain_batch(x_BTD), carry

    # ------------------------------------------------------------------------------------------ the recurrent form
    def init_cache(self, batch: int, max_len: int) -> Cache:
        """Return empty caches for `max_len` tokens, per layer group and pattern position.

        Unlike the parameters, they are not stacked: only separate arrays can be updated in place, one token at a time.
        Raises `UserError` if a position table is shorter.
        """
        self.check_length(max_len)
        return tuple(
            {i: b.bind(b.shapes).init_cache(batch, max_len, self.dtype) for i, b in self.blocks.items()}
            for _ in range(self.repeats)
        )

    def grow_cache(self, cache: Cache, batch: int, max_len: int) -> Cache:
        """Return `cache` enlarged to `max_len` tokens (see `Mixer.init_cache`)."""

        def grown(empty: Array, old: Array) -> Array:
            return old if old.shape == empty.shape else jax.lax.dynamic_update_slice(empty, old, [0] * old.ndim)

        return jax.tree.map(grown, self.init_cache(batch, max_len), cache)

    def prefill(self, params: Params, tokens_BT: Array, cache: Cache) -> tuple[Array, Cache]:
        """Fill an empty cache with a prompt.

        Returns the float32 logits after the last token [B, O] and the cache.
        """
        require_array("tokens_BT", tokens_BT, "B, T", integer=True)
        x_BTD, cache = self._decode(params, self.embed(params, tokens_BT), cache, "prefill")
        return self._embedder(params).decode(self._normalize(params, x_BTD[:, -1])), cache

    def prefill_next(self, params: Params, tokens_BT: Array, position: Array, cache: Cache) -> tuple[Array, Cache]:
        """Add prompt tokens from `position` on to a cache with all earlier tokens.

        Returns the float32 logits after the last token [B, O] and the cache. At position 0 the cache is empty.
        """
        require_array("tokens_BT", tokens_BT, "B, T", integer=True)
        x_BTD, cache = self._decode(params, self.embed(params, tokens_BT, position), cache, "prefill_next")
        return self._embedder(params).decode(self._normalize(params, x_BTD[:, -1])), cache

    def step(self, params: Params, token_B: Array, position: Array, cache: Cache) -> tuple[Array, Cache]:
        """Add one token at `position` to the cache.

        Returns the float32 logits of the next token [B, O] and the cache.
        """
        require_array("token_B", token_B, "B", integer=True)
        x_BD, cache = self._decode(params, self.embed(params, token_B[:, None], position)[:, 0], cache, "step")
        return self._embedder(params).decode(self._normalize(params, x_BD)), cache

    def _decode(
        self, params: Params, x: Array, cache: Cache, form: Literal["prefill", "prefill_next", "step"]
    ) -> tuple[Array, Cache]:
        """Apply all layers with their caches to tokens [B, T, D] or one token [B, D].

        The layers are unrolled: a scan returns new caches and would thus write every cache in full for each token.
        """
        carry, layer, new = self._init_carry(x), 0, []
        for layers, caches in zip(unstack(params["blocks"], self.repeats), cache, strict=True):
            new.append({})
            for slot, template in self.blocks.items():
                block = template.bind(layers[slot])
                apply = {"prefill": block.prefill, "prefill_next": block.prefill_next, "step": block.step}[form]
                x, carry, new[-1][slot] = apply(x, carry, caches[slot], layer=jnp.int32(layer), dtype=self.dtype)
                layer += 1
        return self._final_stream(params, x, carry), tuple(new)

    # ------------------------------------------------------------------------------------------------ both ends
    def embed(
        self,
        params: Params,
        tokens_BT: Array,
        start: Array | int = 0,
        *,
        positions_BT: Array | None = None,
        embed_NOD: Array | None = None,
    ) -> Array:
        """Return the embeddings [B, T, D] of tokens from position `start` on, or at `positions_BT`.

        They have the residual stream's dtype. The table's gradient goes to its copies `embed_NOD`, if any.
        """
        x_BTD = self._embedder(params).encode(tokens_BT, start, positions_BT=positions_BT, copies_NOD=embed_NOD)
        return x_BTD.astype(self.residual_dtype)

    def _init_carry(self, x: Array) -> Carry:
        carry: Carry = {}
        for block in self.abstract_blocks():
            carry |= block.init_carry(x)
        return carry

    def _final_stream(self, params: Params, x: Array, carry: Carry) -> Array:
        """Return the input of the final norm: the residual stream, or the last mix of attention residuals."""
        mix = self._embedder(params).mix
        return x if mix is None else mix(carry[SOURCES], x, len(carry[SOURCES]))

    def _embedder(self, params: Params) -> Embedder:
        if not isinstance(params, Mapping):
            raise TypeError(f"params is {type(params).__name__} instead of the dict of Model.init.")
        return self.embedder.bind({name: x for name, x in params.items() if name != "blocks"})

    def _normalize(self, params: Params, x: Array) -> Array:
        return constrain_batch(self._embedder(params).norm(x).astype(self.dtype))
