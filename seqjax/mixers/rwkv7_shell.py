"""RWKV-7's block around another core: full, window or Top-1 attention.

    q = lerp(x; mu_r) W_r;  k = lerp(x; mu_k) W_k;  v = lerp(x; mu_v) W_v, mixed with the first layer's as in RWKV-7
    o = core(rope(q), rope(k), v);   out = (GroupNorm(o) * sigmoid(lerp(x; mu_g) g1) g2) W_o

arXiv 2505.18522, the experiments at 100k tokens: only the sequence modelling of RWKV-7 is replaced. The parts of its
recurrence are removed: decay and eta, k_k, k_a and the bonus. Token shift, value residual, output gate and GroupNorm
remain and can be disabled: 137.1M parameters untied with all four (without the first layer's v-LoRA, which it does not
use), 134.1M with none. W_k is initialised orthogonal with scale 1; RWKV's scale of 0.1 would make the softmax uniform.
Queries and keys are normalised only for Top-1, unless `qk_norm` is set. ChannelMix keeps its token shift.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._attention import AttentionMixer
from seqjax.mixers._rwkv import GroupNorm, group_norm_gain
from seqjax.mixers._rwkv7 import Block, Lora, TimeMix, TokenShift, ValueResidual, first_values
from seqjax.mixers._rwkv7 import gate_rank as published_gate_rank
from seqjax.mixers._rwkv7 import value_rank as published_value_rank
from seqjax.mixers.top1_chunk import Top1Chunk
from seqjax.mixers.transformer_pp import TransformerPP
from seqjax.nn.initializers import constant, orthogonal
from seqjax.nn.layers import Linear
from seqjax.types import Array, Layer


class ShellCache(NamedTuple):
    """The core's keys and values, and the previous token's input."""

    core: Any
    last_BD: Array


class RWKV7Shell(TimeMix):
    """The time mix around an attention core with RWKV's initial projections.

    Outside a model it acts as a first layer. The value residual (`v_lora`) then has no effect and gets no gradient.
    """

    block = Block
    resets = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        # replaces the recurrence
        core: Literal[
            "full", "window", "top1_exact", "top1_best_key", "top1_best_key_int8", "top1_approx"
        ] = "top1_exact",
        window: int = 256,  # for core=window
        chunk_size: int = 128,  # for the Top-1 cores
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 1e6,
        qk_norm: bool | None = None,  # as in the attention mixers; None = only for the Top-1 cores
        key_init: float = 1.0,  # scale of the orthogonal initialisation of W_k
        token_shift: bool = True,  # this and the next three: the parts of RWKV-7's time mix to keep
        value_residual: bool = True,
        gate: bool = True,
        head_norm: bool = True,
        value_rank: int | None = None,  # None = as published for the model width
        gate_rank: int | None = None,  # None = as published for the model width
        implementation: str | None = None,
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        if core == "window" and window < 1:
            raise UserError(f"window={window} must be at least 1; set the number of keys, or core=full for all.")
        base.at_least(1, value_rank=value_rank, gate_rank=gate_rank)
        is_top1 = core.startswith("top1")
        shared: Any = {
            "heads": heads,
            "position": position,
            "rope_base": rope_base,
            "qk_norm": is_top1 if qk_norm is None else qk_norm,
            "implementation": implementation,
            "layer": layer,
            "rngs": rngs,
        }
        if is_top1:
            selection: Any = core.removeprefix("top1_")
            self.core: AttentionMixer = Top1Chunk(dim, chunk_size=chunk_size, selection=selection, **shared)
        else:
            self.core = TransformerPP(dim, window=window if core == "window" else None, **shared)
        self.dim, self.heads, self.head_dim = dim, heads, self.core.head_dim

        def linear(scale: float) -> Linear:
            return Linear(dim, dim, axes=("embed", "heads"), init=orthogonal(scale), rngs=rngs)

        self.core.q, self.core.k, self.core.v = linear(1.0), linear(key_init), linear(1.0)
        self.core.out = Linear(dim, dim, axes=("heads", "embed"), init=constant(0.0), rngs=rngs)
        self.mu = TokenShift("rkvg" if gate else "rkv", dim, layer, rngs=rngs) if token_shift else None
        n_v, n_g = value_rank or published_value_rank(dim), gate_rank or published_gate_rank(dim)
        self.v_lora = ValueResidual(dim, n_v, rngs=rngs) if value_residual else None
        self.g_lora = Lora(dim, n_g, activation=jax.nn.sigmoid, rngs=rngs) if gate else None
        gain = group_norm_gain(layer)
        self.norm = GroupNorm(heads, self.head_dim, gain=gain, rngs=rngs) if head_norm else None

    def _shifted_inputs(self, x_BTD: Array, last_BD: Array | None, segments: Array | None = None) -> dict[str, Array]:
        """Return the inputs of r (the query), k, v and g."""
        return dict.fromkeys("rkvg", x_BTD) if self.mu is None else self.mu(x_BTD, last_BD, segments)

    def time_mix(
        self,
        x_BTD: Array,
        cache: Any,
        *,
        v_first_BTD: Array | None = None,
        layer: Array | int = 0,
        continues: bool = False,
        segments: Array | None = None,
    ) -> tuple[Array, Array, Any]:
        """Return the output, the first layer's values [B, T, D], and the cache.

        `cache` is None in training. In decoding it is empty, unless the sequence `continues`.
        """
        x = self._shifted_inputs(x_BTD, None if cache is None else cache.last_BD, segments)
        q_BTD, k_BTD, own_v_BTD = self.core.q(x["r"]), self.core.k(x["k"]), self.core.v(x["v"])
        v_BTD = own_v_BTD
        if self.v_lora is not None and v_first_BTD is not None:
            v_BTD = self.v_lora.mix(x["v"], own_v_BTD, v_first_BTD, layer)
        attend = self.core.attend_next if continues else self.core.attend_sequence
        packed = {} if segments is None else {"segments": segments}
        o_BTHK, core_cache = attend(q_BTD, k_BTD, v_BTD, None if cache is None else cache.core, **packed)
        if cache is not None:
            cache = ShellCache(core_cache, x_BTD[:, -1].astype(cache.last_BD.dtype))
        gate_BTD = None if self.g_lora is None else self.g_lora(x["g"], dtype=x_BTD.dtype)
        if self.norm is not None:
            y_BTD = self.norm(o_BTHK, gate_BTD)
        else:
            y_BTD = o_BTHK.reshape(x_BTD.shape)
            y_BTD = y_BTD if gate_BTD is None else y_BTD * gate_BTD
        return self.core.out(y_BTD), first_values(own_v_BTD, v_first_BTD, layer), cache

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> ShellCache:
        """Return the core's empty cache and a zero input for the previous token."""
        return ShellCache(self.core.init_cache(batch, max_len, dtype), jnp.zeros((batch, self.dim), dtype))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the core's forward FLOPs per token."""
        return self.core.flops_per_token(seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """Return the core's training FLOPs per token; its selection has no backward."""
        return self.core.train_flops_per_token(seq_len)

    def entropy(self, x_BTD: Array) -> Array | None:
        """Return the entropy of the core's weights in nats, float32 [B, T, H].

        None for the Top-1 cores.
        """
        return self.core.weights_entropy(*self.queries_and_keys(x_BTD))

    def queries_and_keys(self, x_BTD: Array) -> tuple[Array, Array]:
        """Return the core's queries and keys [B, T, H, K], normalised and rotated."""
        x, seq_len = self._shifted_inputs(x_BTD, None), x_BTD.shape[1]
        k_BTD = self.core.k(x["k"])
        # The values do not matter here; the keys are passed as placeholders.
        q_BTHK, k_BTHK, _ = self.core.split_heads(self.core.q(x["r"]), k_BTD, k_BTD, jnp.arange(seq_len), seq_len)
        return q_BTHK, k_BTHK
