"""The base of the attention mixers: projections, QK norm, RoPE and KV cache.

A subclass defines how queries attend to keys: for a whole sequence (`attend`) and for one query and a cache
(`attend_step`). Further inputs per token, such as FoX's log forget gates [B, T, H], are passed along as `gates`.

`conv` replaces each projection x of q, k and v by x_t + sum_{i < 4} w_i x_{t - 3 + i}, before QK norm and RoPE. This is
a causal depthwise convolution over 4 tokens with a residual connection, without bias or activation. Its taps start as
U(+-1/2) (the Canon-B layer of Allen-Zhu, arXiv 2512.17351).

`gate` multiplies the heads' outputs by sigmoid(x W_g), one gate per channel, before the output projection (arXiv
2505.06708, position G1, elementwise; as in Qwen3-Next).
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
from seqjax.nn.initializers import GPT_INIT, residual_init
from seqjax.nn.layers import Linear, RMSNorm, project_float32, save_inputs
from seqjax.nn.short_conv import Canon
from seqjax.ops.documents import document_positions
from seqjax.ops.positions import RopeScaling, alibi_slopes, rope, rope_angles
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array, Layer

# Maps projections, a cache (or None) and gates to the attention output [B, T, H, K] and the extended cache.
Attend = Callable[..., tuple[Array, Any]]


class KVCache(NamedTuple):
    """The keys and values of the tokens seen so far.

    `length`, int32 [], counts all tokens, including tokens that a ring buffer has overwritten.
    """

    k_BSGK: Array
    v_BSGK: Array
    length: Array


class ConvKVCache(NamedTuple):
    """The cache of a mixer with `conv`: attention cache and last W - 1 projections."""

    attention: Any
    q_BWE: Array
    k_BWE: Array
    v_BWE: Array

    @property
    def length(self) -> Array:
        """The number of tokens seen so far, int32 []."""
        return self.attention.length


def positions_of_slots(length: Array, slots: int) -> Array:
    """Return the token position in each cache slot, int32 [S].

    Slot s holds the newest position congruent to s modulo the number of slots. A negative value means an empty slot.
    """
    return length - 1 - (length - 1 - jnp.arange(slots)) % slots


def rotated_channels(head_dim: int, rope_share: float) -> int:
    """Return the number of channels per head that partial RoPE rotates; `rope_share` is their share of `head_dim`.

    Raises `UserError` for a share that is not an even number of channels.
    """
    width = round(rope_share * head_dim)
    if not 0 < rope_share <= 1 or width % 2 or abs(width - rope_share * head_dim) > 0.01:
        raise UserError(
            f"rope_share={rope_share} of head width {head_dim} is {rope_share * head_dim:g} channels; set a share in "
            f"(0, 1] that gives an even number, such as {2 * max(1, head_dim // 4) / head_dim:g}."
        )
    return width


class Projection(Linear):
    """A `Linear` that ignores its second argument, the positions."""

    def __call__(self, x_BTD: Array, positions_T: Array) -> Array:
        """Map [B, T, D] to [B, T, width]."""
        del positions_T
        return super().__call__(x_BTD)


class ProjectionConv(nnx.Module):
    """The convolutions of `conv`, x + conv(x), with separate filters for q, k and v."""

    def __init__(self, q_width: int, kv_width: int, *, rngs: nnx.Rngs):
        self.q, self.k, self.v = (Canon(width, axis="heads", rngs=rngs) for width in (q_width, kv_width, kv_width))

    def __call__(
        self, q_BTE: Array, k_BTE: Array, v_BTE: Array, segments: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Convolve the projections of whole sequences, [B, T, E] each."""
        packed = {"segments": segments}
        return self.q(q_BTE, **packed), self.k(k_BTE, **packed), self.v(v_BTE, **packed)

    def extend(
        self, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: ConvKVCache
    ) -> tuple[tuple[Array, Array, Array], ConvKVCache]:
        """Convolve the projections of tokens that continue the sequence of `cache`.

        The new cache holds the last W - 1 of these projections.
        """
        q_BTE, q_BWE = self.q.extend(q_BTE, cache.q_BWE)
        k_BTE, k_BWE = self.k.extend(k_BTE, cache.k_BWE)
        v_BTE, v_BWE = self.v.extend(v_BTE, cache.v_BWE)
        return (q_BTE, k_BTE, v_BTE), cache._replace(q_BWE=q_BWE, k_BWE=k_BWE, v_BWE=v_BWE)

    def init_cache(self, attention: Any, batch: int, dtype: Any) -> ConvKVCache:
        """Return an empty cache that wraps the attention cache."""
        return ConvKVCache(attention, *(conv.init_cache(batch, dtype) for conv in (self.q, self.k, self.v)))


@save_inputs
def sigmoid_gate(gate: Array, y: Array) -> Array:
    """Return sigmoid(gate) * y in the dtype of `y`."""
    return (jax.nn.sigmoid(gate) * y).astype(y.dtype)


class AttentionMixer(base.Mixer):
    """The base of the family: x -> q, k, v -> `attend` -> output projection."""

    window: int = 0  # cache size in keys; 0 means the whole sequence
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
        qk_norm: bool | Literal["full"],
        bias: bool,
        conv: bool,
        layer: Layer,
        rngs: nnx.Rngs,
        # Only softmax attention uses these.
        rope_share: float = 1.0,
        rope_scaling: RopeScaling | None = None,
        qk_norm_eps: float = 1e-5,
        qkv_bias: bool | None = None,
        gate: bool = False,
        rescale_init: bool = True,
    ):
        """Build the projections; `transformer_pp.TransformerPP` documents the settings.

        A subclass sets the attributes that its `make_q`, `make_k` and `attend` read before it calls this.
        """
        for name, value, usual in (
            ("heads", heads, ""),
            ("kv_heads", kv_heads, "the same as heads"),
            ("head_dim", head_dim, "model width / heads"),
        ):
            if value is not None and value < 1:
                none = f"; None means {usual}" if usual else ""
                raise UserError(f"{name} must be at least 1, not {value}{none}.")
        if not 0 < rope_base < math.inf:
            raise UserError(
                f"rope_base must be positive and finite, not {rope_base}; for no rotation, set position=none."
            )
        if head_dim is None and dim % heads:
            raise UserError(
                f"heads={heads} does not divide {base.size(dim=dim)}; choose heads that do, or set head_dim."
            )
        if kv_heads and heads % kv_heads:
            raise UserError(f"kv_heads={kv_heads} must divide heads={heads}.")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads or heads, head_dim or dim // heads
        if position == "rope" and rope_share == 1 and self.head_dim % 2:
            raise UserError(
                f"position=rope rotates pairs, so the head width {self.head_dim} must be even; set an even head_dim."
            )
        if position != "rope" and rope_share != 1:
            raise UserError(f"rope_share={rope_share} needs position=rope, not {position!r}; set rope_share=1.")
        self.position, self.rope_base, self.rope_scaling = position, rope_base, rope_scaling
        self.rope_dim = rotated_channels(self.head_dim, rope_share) if position == "rope" else 0
        self.qkv_bias = bias if qkv_bias is None else qkv_bias
        q_width, kv_width = heads * self.head_dim, self.kv_heads * self.head_dim
        self.q = self.make_q(dim, q_width, layer, rngs)
        self.k = self.make_k(dim, kv_width, layer, rngs)
        self.v = Linear(dim, kv_width, axes=("embed", "heads"), bias=self.qkv_bias, rngs=rngs)
        init = residual_init(layer.n_layers) if rescale_init else GPT_INIT
        self.out = Linear(q_width, dim, axes=("heads", "embed"), bias=bias, init=init, rngs=rngs)
        self.norms_all_heads = qk_norm == "full"
        self.q_norm = self.make_norm(self.heads, qk_norm_eps, rngs) if qk_norm else None
        self.k_norm = self.make_norm(self.kv_heads, qk_norm_eps, rngs) if qk_norm else None
        # Drawn after q, k, v and out, so that `conv` does not change their initial values. It does change the gate's.
        self.conv = ProjectionConv(q_width, kv_width, rngs=rngs) if conv else None
        if gate:
            self.gate = Linear(dim, q_width, axes=("embed", "heads"), rngs=rngs)

    def make_q(self, dim: int, width: int, layer: Layer, rngs: nnx.Rngs) -> Any:
        """Return the module that maps input and positions to queries [B, T, width]."""
        del layer
        return Projection(dim, width, axes=("embed", "heads"), bias=self.qkv_bias, rngs=rngs)

    def make_k(self, dim: int, width: int, layer: Layer, rngs: nnx.Rngs) -> Any:
        """Return the module that maps input and positions to keys [B, T, width]."""
        del layer
        return Projection(dim, width, axes=("embed", "heads"), bias=self.qkv_bias, rngs=rngs)

    def make_norm(self, heads: int, eps: float, rngs: nnx.Rngs) -> RMSNorm:
        """Return the RMSNorm for `heads` heads.

        By default it normalises each head, with one gain for all, or with qk_norm="full" the channels of all heads.
        """
        if self.norms_all_heads:
            return RMSNorm(heads * self.head_dim, eps=eps, axis="heads", rngs=rngs)
        return RMSNorm(self.head_dim, eps=eps, axis=None, rngs=rngs)

    def normalize(self, q_BTHK: Array, k_BTGK: Array) -> tuple[Array, Array]:
        """Return queries and keys before rotation, normalised if `qk_norm` is set."""
        if self.q_norm is None or self.k_norm is None:
            return q_BTHK, k_BTGK
        if self.norms_all_heads:
            q_BTE, k_BTE = (x.reshape(*x.shape[:2], -1) for x in (q_BTHK, k_BTGK))
            return self.q_norm(q_BTE).reshape(q_BTHK.shape), self.k_norm(k_BTE).reshape(k_BTGK.shape)
        return self.q_norm(q_BTHK), self.k_norm(k_BTGK)

    @abc.abstractmethod
    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, *gates: Array, **segments: Array) -> Array:
        """Attend causally over a whole sequence; return [B, T, H, K].

        A mixer that `resets` accepts `segments`.
        """

    @abc.abstractmethod
    def attend_step(self, q_BHK: Array, cache: Any) -> Array:
        """Attend from one query to the cache; return [B, H, K].

        The cache already contains the query's key and value.
        """

    def weights_entropy(self, q_BTHK: Array, k_BTGK: Array) -> Array | None:
        """Return the entropy of the softmax weights in nats, float32 [B, T, H].

        Queries and keys are already rotated. The result is None if the weights are not a softmax over the past.
        """
        del q_BTHK, k_BTGK
        return None

    @property
    def slopes(self) -> tuple[float, ...]:
        """The ALiBi slopes, one per head; empty without ALiBi."""
        return alibi_slopes(self.heads) if self.position == "alibi" else ()

    def project(self, x_BTD: Array, positions_T: Array) -> tuple[Array, Array, Array]:
        """Return the projections q [B, T, H * K], k and v [B, T, G * K]."""
        return self.q(x_BTD, positions_T), self.k(x_BTD, positions_T), self.v(x_BTD)

    def split_heads(
        self, q_BTE: Array, k_BTE: Array, v_BTE: Array, positions_T: Array, max_len: int
    ) -> tuple[Array, Array, Array]:
        """Return q [B, T, H, K] and k, v [B, T, G, K], with q and k normed and rotated.

        All positions are below `max_len`.
        """
        q_BTHK, k_BTGK, v_BTGK = (x.reshape(*x.shape[:2], -1, self.head_dim) for x in (q_BTE, k_BTE, v_BTE))
        q_BTHK, k_BTGK = self.normalize(q_BTHK, k_BTGK)
        if self.position == "rope":
            angles = rope_angles(
                positions_T,
                head_dim=self.rope_dim,
                base=self.rope_base,
                max_len=max_len,
                scaling=self.rope_scaling,
            )
            q_BTHK, k_BTGK = rope(q_BTHK, *angles), rope(k_BTGK, *angles)
        return q_BTHK, k_BTGK, v_BTGK

    def queries_and_keys(self, x_BTD: Array) -> tuple[Array, Array]:
        """Return the normalised, rotated queries and keys of a whole sequence.

        Queries are [B, T, H, K], keys [B, T, G, K].
        """
        positions_T = jnp.arange(x_BTD.shape[1])
        projections = self.project(x_BTD, positions_T)
        if self.conv is not None:
            projections = self.conv(*projections)
        q_BTHK, k_BTGK, _ = self.split_heads(*projections, positions_T, x_BTD.shape[1])
        return q_BTHK, k_BTGK

    def attend_sequence(
        self, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: Any, *gates: Array, segments: Array | None = None
    ) -> tuple[Array, Any]:
        """Attend over a whole sequence of projections.

        Returns [B, T, H, K] and the filled cache (None for None).
        """
        seq_len, packed = q_BTE.shape[1], {}
        positions = jnp.arange(seq_len)
        if segments is not None:
            positions, packed = document_positions(segments), {"segments": gather_time(segments)}
        q_BTHK, k_BTGK, v_BTGK = self.split_heads(q_BTE, k_BTE, v_BTE, positions, seq_len)
        q_BTHK, k_BTGK, v_BTGK, *gates_BTH = (time_to_heads(x) for x in (q_BTHK, k_BTGK, v_BTGK, *gates))
        o_BTHK = heads_to_time(self.attend(q_BTHK, k_BTGK, v_BTGK, *gates_BTH, **packed))
        return o_BTHK, None if cache is None else self.extend(cache, k_BTGK, v_BTGK, *gates_BTH)

    def attend_next(self, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: Any, *gates: Array) -> tuple[Array, Any]:
        """Attend from T tokens that continue the cached sequence.

        Returns [B, T, H, K] and the extended cache.
        """
        positions_T = cache.length + jnp.arange(v_BTE.shape[1])
        # Positions exceed the length of a ring buffer, so the rotary table must be longer.
        max_len = cache.k_BSGK.shape[1] if not self.window else 2**20
        q_BTHK, k_BTGK, v_BTGK = self.split_heads(q_BTE, k_BTE, v_BTE, positions_T, max_len)
        if v_BTE.shape[1] > 1:
            return self.attend_after(q_BTHK, k_BTGK, v_BTGK, cache, *gates)
        cache = self.extend(cache, k_BTGK, v_BTGK, *gates)
        return self.attend_step(q_BTHK[:, 0], cache)[:, None], cache

    def attend_after(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: Any, *gates: Array) -> tuple[Array, Any]:
        """Attend from T new tokens, normed and rotated; by default token by token.

        Returns [B, T, H, K] and the extended cache.
        """

        def body(cache: Any, inputs: tuple[Array, ...]) -> tuple[Any, Array]:
            q_BHK, *entries = inputs
            cache = self.extend(cache, *(x[:, None] for x in entries))
            return cache, self.attend_step(q_BHK, cache)

        inputs = tuple(jnp.moveaxis(x, 1, 0) for x in (q_BTHK, k_BTGK, v_BTGK, *gates))
        cache, o_TBHK = lax.scan(body, cache, inputs)
        return jnp.moveaxis(o_TBHK, 0, 1), cache

    def convolve_and_attend(
        self, attend: Attend, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: Any, *gates: Array, **segments: Array
    ) -> tuple[Array, Any]:
        """Apply the convolutions, if any, and then `attend`.

        `attend` is `attend_sequence` or `attend_next`.
        """
        if self.conv is None:
            return attend(q_BTE, k_BTE, v_BTE, cache, *gates, **segments)
        if cache is None:
            return attend(*self.conv(q_BTE, k_BTE, v_BTE, **segments), None, *gates, **segments)
        convolved, cache = self.conv.extend(q_BTE, k_BTE, v_BTE, cache)
        o_BTHK, attention = attend(*convolved, cache.attention, *gates)
        return o_BTHK, cache._replace(attention=attention)

    def __call__(self, x_BTD: Array, segments: Array | None = None) -> Array:
        """Apply the parallel form: [B, T, D] to [B, T, D]; a subclass that `resets` accepts `segments`."""
        if segments is None:
            return self.prefill(x_BTD, None)[0]
        return self.mix(self.attend_sequence, x_BTD, document_positions(segments), None, segments=segments)[0]

    def prefill(self, x_BTD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the parallel form to a prompt and fill an empty cache (None for None)."""
        return self.mix(self.attend_sequence, x_BTD, jnp.arange(x_BTD.shape[1]), cache)

    def prefill_next(self, x_BTD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the mixer to T tokens that continue the cached sequence."""
        return self.mix(self.attend_next, x_BTD, cache.length + jnp.arange(x_BTD.shape[1]), cache)

    def step(self, x_BD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the recurrent form to one token."""
        y_BTD, cache = self.mix(self.attend_next, x_BD[:, None], cache.length[None], cache)
        return y_BTD[:, 0], cache

    def mix(self, attend: Attend, x_BTD: Array, positions_T: Array, cache: Any, **segments: Array) -> tuple[Array, Any]:
        """Apply the mixer to tokens at consecutive positions.

        `attend` is `attend_sequence` or `attend_next`. With `segments`, the positions are [B, T].
        """
        o_BTHK, cache = self.convolve_and_attend(attend, *self.project(x_BTD, positions_T), cache, **segments)
        return self.output(x_BTD, o_BTHK), cache

    def output(self, x_BTD: Array, o_BTHK: Array) -> Array:
        """Return the output projection of the heads' outputs, after the output gate."""
        y_BTE = o_BTHK.reshape(*x_BTD.shape[:2], -1)
        if self.gate is not None:
            y_BTE = sigmoid_gate(project_float32(self.gate, x_BTD), y_BTE)
        return self.out(y_BTE)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Any:
        """Return an empty attention cache, inside a `ConvKVCache` with `conv`."""
        attention = self.init_attention_cache(batch, max_len, dtype)
        return attention if self.conv is None else self.conv.init_cache(attention, batch, dtype)

    def init_attention_cache(self, batch: int, max_len: int, dtype: Any) -> Any:
        """Return an empty `KVCache` of `max_len` entries, at most `window`."""
        slots = min(max_len, self.window or max_len)
        shape = (batch, slots, self.kv_heads, self.head_dim)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    def extend(self, cache: Any, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> Any:
        """Return the cache with T more keys and values.

        Position p is stored in slot p modulo the number of slots.
        """
        del gates
        k_BSGK, v_BSGK = (
            self.store(old_BSGK, new_BTGK, cache.length)
            for old_BSGK, new_BTGK in ((cache.k_BSGK, k_BTGK), (cache.v_BSGK, v_BTGK))
        )
        return cache._replace(k_BSGK=k_BSGK, v_BSGK=v_BSGK, length=cache.length + k_BTGK.shape[1])

    def store(self, old_BS: Array, new_BT: Array, length: Array) -> Array:
        """Return the slots [B, S, ...] of a cache of `length` tokens with T more entries."""
        slots, n_new = old_BS.shape[1], new_BT.shape[1]
        # If there are more tokens than slots, the last tokens are kept.
        new_BT = new_BT[:, -slots:].astype(old_BS.dtype)
        start = (length + n_new - new_BT.shape[1]) % slots
        if self.window and n_new > 1:  # may wrap around the ring buffer
            return old_BS.at[:, (start + jnp.arange(new_BT.shape[1])) % slots].set(new_BT)
        return lax.dynamic_update_slice_in_dim(old_BS, new_BT, start, 1)
