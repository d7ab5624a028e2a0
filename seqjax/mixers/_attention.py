"""The base of the attention mixers: projections, QK norm, rotary positions, the KV cache and its ring buffer.

A mixer of this family defines how queries attend to keys, over the whole sequence (`attend`) and for one query over a
cache (`attend_step`). What it has beside q, k and v for every token and head, such as FoX's forget gates, goes the same
way, as `gates` [B, T, H].

With `conv`, q, k and v are y_t = x_t + sum_{i < 4} w_i x_{t - 3 + i} of their projections x, before QK norm and RoPE.
This is a causal convolution of each channel with a residual connection, without bias and activation, and with taps
drawn from U(+-1/2) (the Canon-B layer of Allen-Zhu, arXiv 2512.17351).

With `gate`, the heads' output is multiplied by sigmoid(x W_g), a gate per channel, before the output projection
(arXiv 2505.06708, position G1, elementwise; as in Qwen3-Next).
"""

import abc
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.nn.initializers import residual_init
from seqjax.nn.layers import Linear, RMSNorm, project_float32, save_inputs
from seqjax.nn.short_conv import Canon
from seqjax.ops.positions import RopeScaling, alibi_slopes, rope, rope_angles
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array, Layer

# Projections, a cache (or None) and gates to the attention's output [B, T, H, K] and the cache with the new tokens.
Attend = Callable[..., tuple[Array, Any]]


class KVCache(NamedTuple):
    """The keys and values of the tokens seen so far.

    `length`, int32 [], counts all of them, including those that a ring buffer has overwritten.
    """

    k_BSGK: Array
    v_BSGK: Array
    length: Array


class ConvKVCache(NamedTuple):
    """The cache of a mixer with `conv`: the cache of its attention, and the last W - 1 projections."""

    attention: Any
    q_BWE: Array
    k_BWE: Array
    v_BWE: Array

    @property
    def length(self) -> Array:
        """The number of tokens seen so far, int32 []."""
        return self.attention.length


def positions_of_slots(length: Array, slots: int) -> Array:
    """Return the position that each slot of a cache of `length` tokens holds, the newest congruent one, int32 [S].

    A negative one means that the slot is empty.
    """
    return length - 1 - (length - 1 - jnp.arange(slots)) % slots


class Projection(Linear):
    """A `Linear` that also takes positions, which only a position table uses, and ignores them."""

    def __call__(self, x_BTD: Array, positions_T: Array) -> Array:
        """Map [B, T, D] to [B, T, width]."""
        del positions_T
        return super().__call__(x_BTD)


class ProjectionConv(nnx.Module):
    """The convolutions of `conv`, x + conv(x), with filters of their own for the channels of q, of k and of v."""

    def __init__(self, q_width: int, kv_width: int, *, rngs: nnx.Rngs):
        self.q, self.k, self.v = (Canon(width, axis="heads", rngs=rngs) for width in (q_width, kv_width, kv_width))

    def __call__(self, q_BTE: Array, k_BTE: Array, v_BTE: Array) -> tuple[Array, Array, Array]:
        """Convolve the projections of whole sequences, [B, T, E] each."""
        return self.q(q_BTE), self.k(k_BTE), self.v(v_BTE)

    def extend(
        self, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: ConvKVCache
    ) -> tuple[tuple[Array, Array, Array], ConvKVCache]:
        """Convolve the projections of tokens that follow those of `cache`; the cache gets their last W - 1."""
        q_BTE, q_BWE = self.q.extend(q_BTE, cache.q_BWE)
        k_BTE, k_BWE = self.k.extend(k_BTE, cache.k_BWE)
        v_BTE, v_BWE = self.v.extend(v_BTE, cache.v_BWE)
        return (q_BTE, k_BTE, v_BTE), cache._replace(q_BWE=q_BWE, k_BWE=k_BWE, v_BWE=v_BWE)

    def init_cache(self, attention: Any, batch: int, dtype: Any) -> ConvKVCache:
        """Return the empty cache around that of the attention."""
        return ConvKVCache(attention, *(conv.init_cache(batch, dtype) for conv in (self.q, self.k, self.v)))


@save_inputs
def sigmoid_gate(gate: Array, y: Array) -> Array:
    """Return sigmoid(gate) * y in the dtype of `y`."""
    return (jax.nn.sigmoid(gate) * y).astype(y.dtype)


class AttentionMixer(base.Mixer):
    """The base of the family: x -> q, k, v -> `attend` -> output projection."""

    window: int = 0  # the number of keys that a decoding cache must hold; 0 means all
    gate: Linear | None = None

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None,
        head_dim: int | None,
        position: Literal["rope", "alibi", "none"],
        rope_base: float,
        qk_norm: bool,
        bias: bool,
        conv: bool,
        layer: Layer,
        rngs: nnx.Rngs,
        # Of softmax attention alone, so the others leave them out.
        rope_scaling: RopeScaling | None = None,
        qk_norm_eps: float = 1e-5,
        qkv_bias: bool | None = None,
        gate: bool = False,
    ):
        """Build the projections; the settings are those of `transformer_pp.TransformerPP`.

        A subclass sets what its `make_q`, `make_k` and `attend` need before it calls this.
        """
        for name, value, usual in (
            ("heads", heads, ""),
            ("kv_heads", kv_heads, "as many as heads"),
            ("head_dim", head_dim, "model width / heads"),
        ):
            if value is not None and value < 1:
                none = f"; None is for {usual}" if usual else ""
                raise UserError(f"{name} must be at least 1, not {value}{none}.")
        if not 0 < rope_base < math.inf:
            raise UserError(
                f"rope_base must be positive and finite, not {rope_base}; without rotation is position=none."
            )
        if head_dim is None and dim % heads:
            raise UserError(
                f"heads={heads} does not divide {base.size(dim=dim)}; choose heads that do, or set head_dim."
            )
        if kv_heads and heads % kv_heads:
            raise UserError(f"kv_heads={kv_heads} must divide heads={heads}.")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads or heads, head_dim or dim // heads
        if position == "rope" and self.head_dim % 2:
            raise UserError(
                f"position=rope rotates pairs, so the head width {self.head_dim} must be even; choose heads or "
                "head_dim so that it is."
            )
        self.position, self.rope_base, self.rope_scaling = position, rope_base, rope_scaling
        self.qkv_bias = bias if qkv_bias is None else qkv_bias
        q_width, kv_width = heads * self.head_dim, self.kv_heads * self.head_dim
        self.q = self.make_q(dim, q_width, layer, rngs)
        self.k = self.make_k(dim, kv_width, layer, rngs)
        self.v = Linear(dim, kv_width, axes=("embed", "heads"), bias=self.qkv_bias, rngs=rngs)
        init = residual_init(layer.n_layers)
        self.out = Linear(q_width, dim, axes=("heads", "embed"), bias=bias, init=init, rngs=rngs)
        self.q_norm = self.make_norm(self.heads, qk_norm_eps, rngs) if qk_norm else None
        self.k_norm = self.make_norm(self.kv_heads, qk_norm_eps, rngs) if qk_norm else None
        # Drawn last, so that the mixer's other parameters start alike with and without them.
        self.conv = ProjectionConv(q_width, kv_width, rngs=rngs) if conv else None
        if gate:
            self.gate = Linear(dim, q_width, axes=("embed", "heads"), rngs=rngs)

    def make_q(self, dim: int, width: int, layer: Layer, rngs: nnx.Rngs) -> Any:
        """Return the module that computes queries [B, T, width] from the input and the positions."""
        del layer
        return Projection(dim, width, axes=("embed", "heads"), bias=self.qkv_bias, rngs=rngs)

    def make_k(self, dim: int, width: int, layer: Layer, rngs: nnx.Rngs) -> Any:
        """Return the module that computes keys [B, T, width] from the input and the positions."""
        del layer
        return Projection(dim, width, axes=("embed", "heads"), bias=self.qkv_bias, rngs=rngs)

    def make_norm(self, heads: int, eps: float, rngs: nnx.Rngs) -> RMSNorm:
        """Return the norm of each of so many heads, by default with gains that they share."""
        del heads
        return RMSNorm(self.head_dim, eps=eps, axis=None, rngs=rngs)

    def normalize(self, q_BTHK: Array, k_BTGK: Array) -> tuple[Array, Array]:
        """Return the queries and keys, normalised if `qk_norm` is set, before rotation."""
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        return q_BTHK, k_BTGK

    @abc.abstractmethod
    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> Array:
        """Let all queries attend to all keys; return [B, T, H, K]."""

    @abc.abstractmethod
    def attend_step(self, q_BHK: Array, cache: Any) -> Array:
        """Let one query attend to the cache, which already holds its own key and value; return [B, H, K]."""

    def weights_entropy(self, q_BTHK: Array, k_BTGK: Array) -> Array | None:
        """Return the entropy of the softmax weights in nats, float32 [B, T, H], of queries and keys after rotation.

        The result is None if the weights are not a softmax over the past.
        """
        del q_BTHK, k_BTGK
        return None

    @property
    def slopes(self) -> tuple[float, ...]:
        """ALiBi's slopes, one per head; empty without ALiBi."""
        return alibi_slopes(self.heads) if self.position == "alibi" else ()

    def project(self, x_BTD: Array, positions_T: Array) -> tuple[Array, Array, Array]:
        """Return the projections q [B, T, H * K], k and v [B, T, G * K]."""
        return self.q(x_BTD, positions_T), self.k(x_BTD, positions_T), self.v(x_BTD)

    def split_heads(
        self, q_BTE: Array, k_BTE: Array, v_BTE: Array, positions_T: Array, max_len: int
    ) -> tuple[Array, Array, Array]:
        """Return q [B, T, H, K], k and v [B, T, G, K]: normalised and rotated, for positions below `max_len`."""
        q_BTHK, k_BTGK, v_BTGK = (x.reshape(*x.shape[:2], -1, self.head_dim) for x in (q_BTE, k_BTE, v_BTE))
        q_BTHK, k_BTGK = self.normalize(q_BTHK, k_BTGK)
        if self.position == "rope":
            angles = rope_angles(
                positions_T,
                head_dim=self.head_dim,
                base=self.rope_base,
                max_len=max_len,
                scaling=self.rope_scaling,
            )
            q_BTHK, k_BTGK = rope(q_BTHK, *angles), rope(k_BTGK, *angles)
        return q_BTHK, k_BTGK, v_BTGK

    def queries_and_keys(self, x_BTD: Array) -> tuple[Array, Array]:
        """Return the queries [B, T, H, K] and keys [B, T, G, K], normalised and rotated, of a whole sequence."""
        positions_T = jnp.arange(x_BTD.shape[1])
        projections = self.project(x_BTD, positions_T)
        if self.conv is not None:
            projections = self.conv(*projections)
        q_BTHK, k_BTGK, _ = self.split_heads(*projections, positions_T, x_BTD.shape[1])
        return q_BTHK, k_BTGK

    def attend_sequence(self, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: Any, *gates: Array) -> tuple[Array, Any]:
        """Attend over a whole sequence of projections; return [B, T, H, K] and the filled cache (or None)."""
        seq_len = q_BTE.shape[1]
        q_BTHK, k_BTGK, v_BTGK = self.split_heads(q_BTE, k_BTE, v_BTE, jnp.arange(seq_len), seq_len)
        q_BTHK, k_BTGK, v_BTGK, *gates_BTH = (time_to_heads(x) for x in (q_BTHK, k_BTGK, v_BTGK, *gates))
        o_BTHK = heads_to_time(self.attend(q_BTHK, k_BTGK, v_BTGK, *gates_BTH))
        return o_BTHK, None if cache is None else self.extend(cache, k_BTGK, v_BTGK, *gates_BTH)

    def attend_next(self, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: Any, *gates: Array) -> tuple[Array, Any]:
        """Attend from T tokens that follow those in the cache; return [B, T, H, K] and the cache with them."""
        positions_T = cache.length + jnp.arange(v_BTE.shape[1])
        # Positions exceed the length of a ring buffer, so the rotary table must be longer.
        max_len = cache.k_BSGK.shape[1] if not self.window else 2**20
        q_BTHK, k_BTGK, v_BTGK = self.split_heads(q_BTE, k_BTE, v_BTE, positions_T, max_len)
        if v_BTE.shape[1] > 1:
            return self.attend_after(q_BTHK, k_BTGK, v_BTGK, cache, *gates)
        cache = self.extend(cache, k_BTGK, v_BTGK, *gates)
        return self.attend_step(q_BTHK[:, 0], cache)[:, None], cache

    def attend_after(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: Any, *gates: Array) -> tuple[Array, Any]:
        """Do the same with normalised and rotated queries and keys; by default token by token."""

        def body(cache: Any, inputs: tuple[Array, ...]) -> tuple[Any, Array]:
            q_BHK, *entries = inputs
            cache = self.extend(cache, *(x[:, None] for x in entries))
            return cache, self.attend_step(q_BHK, cache)

        inputs = tuple(jnp.moveaxis(x, 1, 0) for x in (q_BTHK, k_BTGK, v_BTGK, *gates))
        cache, o_TBHK = lax.scan(body, cache, inputs)
        return jnp.moveaxis(o_TBHK, 0, 1), cache

    def convolve_and_attend(
        self, attend: Attend, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: Any, *gates: Array
    ) -> tuple[Array, Any]:
        """Convolve the projections, with `conv`, and let them `attend`, by `attend_sequence` or `attend_next`."""
        if self.conv is None:
            return attend(q_BTE, k_BTE, v_BTE, cache, *gates)
        if cache is None:
            return attend(*self.conv(q_BTE, k_BTE, v_BTE), None, *gates)
        convolved, cache = self.conv.extend(q_BTE, k_BTE, v_BTE, cache)
        o_BTHK, attention = attend(*convolved, cache.attention, *gates)
        return o_BTHK, cache._replace(attention=attention)

    def __call__(self, x_BTD: Array) -> Array:
        """Apply the parallel form: [B, T, D] to [B, T, D]."""
        return self.prefill(x_BTD, None)[0]

    def prefill(self, x_BTD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the parallel form to a prompt and fill an empty cache, or return None for a cache of None."""
        return self.mix(self.attend_sequence, x_BTD, jnp.arange(x_BTD.shape[1]), cache)

    def prefill_next(self, x_BTD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the mixer to T tokens after those that `cache` has seen."""
        return self.mix(self.attend_next, x_BTD, cache.length + jnp.arange(x_BTD.shape[1]), cache)

    def step(self, x_BD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the recurrent form to one token."""
        y_BTD, cache = self.mix(self.attend_next, x_BD[:, None], cache.length[None], cache)
        return y_BTD[:, 0], cache

    def mix(self, attend: Attend, x_BTD: Array, positions_T: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the mixer, whose projections `attend`, to tokens at consecutive positions."""
        o_BTHK, cache = self.convolve_and_attend(attend, *self.project(x_BTD, positions_T), cache)
        return self.output(x_BTD, o_BTHK), cache

    def output(self, x_BTD: Array, o_BTHK: Array) -> Array:
        """Return the output projection of the heads' outputs, gated with `gate`."""
        y_BTE = o_BTHK.reshape(*x_BTD.shape[:2], -1)
        if self.gate is not None:
            y_BTE = sigmoid_gate(project_float32(self.gate, x_BTD), y_BTE)
        return self.out(y_BTE)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Any:
        """Return the empty cache of the attention, inside a `ConvKVCache` if there are convolutions."""
        attention = self.init_attention_cache(batch, max_len, dtype)
        return attention if self.conv is None else self.conv.init_cache(attention, batch, dtype)

    def init_attention_cache(self, batch: int, max_len: int, dtype: Any) -> Any:
        """Return an empty `KVCache` of `max_len` entries, or of `window` entries if that is fewer."""
        slots = min(max_len, self.window or max_len)
        shape = (batch, slots, self.kv_heads, self.head_dim)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    def extend(self, cache: Any, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> Any:
        """Return the cache with T more keys and values; position p is in slot p modulo the number of slots."""
        del gates
        k_BSGK, v_BSGK = (
            self.store(old_BSGK, new_BTGK, cache.length)
            for old_BSGK, new_BTGK in ((cache.k_BSGK, k_BTGK), (cache.v_BSGK, v_BTGK))
        )
        return cache._replace(k_BSGK=k_BSGK, v_BSGK=v_BSGK, length=cache.length + k_BTGK.shape[1])

    def store(self, old_BS: Array, new_BT: Array, length: Array) -> Array:
        """Return the slots [B, S, ...] of a cache of `length` tokens with those of T more."""
        slots, n_new = old_BS.shape[1], new_BT.shape[1]
        # Of more tokens than there are slots, the last ones are kept.
        new_BT = new_BT[:, -slots:].astype(old_BS.dtype)
        start = (length + n_new - new_BT.shape[1]) % slots
        if self.window and n_new > 1:  # they may go past the end of the ring buffer
            return old_BS.at[:, (start + jnp.arange(new_BT.shape[1])) % slots].set(new_BT)
        return lax.dynamic_update_slice_in_dim(old_BS, new_BT, start, 1)
