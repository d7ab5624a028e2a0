"""Transformer++ attention: causal softmax, full or windowed, with RoPE.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(K)) v_j for 0 <= i - j < W

arXiv 2505.18522, section 2 and Appendix A. With RMSNorm and GeGLU this is the paper's Transformer++ (109.5M parameters
at 768 x 12, tied); `window=256` is its sliding-window model.

Ablations (section 3): `position` is rope, alibi or none. `const` replaces keys, or queries and keys, by a trained
position table, which limits the sequence length and excludes `conv`. `temperature` scales q and k to unit length; the
scores are then their cosine times sqrt(K) / temperature. `TransformerPP.entropy` is the attention weights' entropy.
"""

import math
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._attention import AttentionMixer, positions_of_slots
from seqjax.nn.initializers import normal
from seqjax.nn.layers import l2_normalize
from seqjax.nn.params import param
from seqjax.ops.attention import attention_at, attention_entropy, attention_step, causal_attention, in_groups
from seqjax.ops.positions import RopeScaling
from seqjax.ops.shared_attention import shared_attention
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array, Layer


class Table(nnx.Module):
    """A position table for queries or keys, with the initial scale of projections."""

    def __init__(self, dim: int, width: int, layer: Layer, *, rngs: nnx.Rngs):
        self.table = param(rngs, normal(0.02 * math.sqrt(dim)), (layer.max_len, width), ("positions", "heads"))

    def __call__(self, x_BTD: Array, positions_T: Array) -> Array:
        """Return the table rows at the positions, [1, T, width] in the dtype of `x_BTD`.

        All sequences of the batch share them, unless the positions are [B, T] (packed documents).
        """
        rows = self.table[...][positions_T].astype(x_BTD.dtype)
        return rows[None] if positions_T.ndim == 1 else rows


def _scaling(
    kind: Literal["none", "linear", "llama3"],
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_len: int,
) -> RopeScaling | None:
    """Return the RoPE scaling of the settings `rope_...`; None for "none".

    Raises `UserError` for an invalid setting.
    """
    if not 1 <= factor < math.inf:
        raise UserError(f"rope_factor={factor} must be finite and at least 1.")
    if not 0 < low_freq_factor < high_freq_factor < math.inf:
        raise UserError(
            f"rope_low_freq_factor={low_freq_factor} must be positive and less than "
            f"rope_high_freq_factor={high_freq_factor}, which must be finite."
        )
    base.at_least(1, rope_original_len=original_len)
    if kind == "none":
        return None
    return RopeScaling(kind, factor, low_freq_factor, high_freq_factor, original_len)


class TransformerPP(AttentionMixer):
    """Causal softmax attention."""

    resets = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; fewer = grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        # With "none", only the causal mask and config.model.learned_positions carry position information.
        position: Literal["rope", "alibi", "none"] = "rope",
        rope_base: float = 10_000.0,
        rope_share: float = 1.0,  # of each head's channels, the first, are rotated (partial RoPE)
        # Lowers RoPE frequencies for longer sequences (`seqjax.ops.positions.RopeScaling`). The next four settings are
        # its numbers, by default Llama 3.1's; "linear" uses only the factor.
        rope_scaling: Literal["none", "linear", "llama3"] = "none",
        rope_factor: float = 8.0,
        rope_low_freq_factor: float = 1.0,
        rope_high_freq_factor: float = 4.0,
        rope_original_len: int = 8192,
        # RMSNorm with a learned gain over each head's q and k, before RoPE; "full" = over the q and k of all heads
        qk_norm: bool | Literal["full"] = False,
        qk_norm_eps: float = 1e-5,
        bias: bool = False,  # of q, k, v and the output projection
        qkv_bias: bool | None = None,  # of q, k and v only; None = as bias
        conv: bool = False,  # adds a convolution over 4 tokens to each of q, k and v, before QK norm and RoPE
        gate: bool = False,  # multiplies the heads' output by sigmoid(x W), a gate per channel
        rescale_init: bool = True,  # divides the output matrix's initial values by sqrt(2 n_layers), as in GPT-2
        window: int | None = None,  # includes the query's own position; None = the whole past
        const: Literal["none", "k", "qk"] = "none",  # keys (and queries) from a trained position table
        temperature: float | None = None,  # of unit queries and keys; None = standard scores
        implementation: Literal["cudnn", "splash", "xla", "chunked"] | None = None,  # None = chosen by device
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        if window is not None and window < 1:
            raise UserError(f"window={window} must be at least 1; set the number of keys, or None for all.")
        if const == "qk" and implementation not in (None, "xla"):
            raise UserError(
                f"implementation={implementation!r} computes a softmax per sequence; const='qk' shares one. Choose "
                "None or 'xla'."
            )
        if const != "none" and conv:
            raise UserError(
                f"conv convolves input projections, which a position table replaces with const={const!r}. "
                "Set conv=False or const=none."
            )
        if temperature is not None and not 0 < temperature < math.inf:
            raise UserError(f"temperature={temperature} must be positive and finite, or None.")
        if temperature is not None and qk_norm:
            raise UserError("temperature already normalises q and k; set qk_norm=False.")
        if not 0 < qk_norm_eps < 1:
            raise UserError(f"qk_norm_eps={qk_norm_eps} must be between 0 and 1.")
        if rope_scaling != "none" and position != "rope":
            raise UserError(
                f"rope_scaling={rope_scaling!r} needs position=rope, not {position!r}; set rope_scaling=none."
            )
        scaling = _scaling(
            rope_scaling,
            factor=rope_factor,
            low_freq_factor=rope_low_freq_factor,
            high_freq_factor=rope_high_freq_factor,
            original_len=rope_original_len,
        )
        self.window, self.const, self.temperature, self.implementation = window or 0, const, temperature, implementation
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position=position,
            rope_base=rope_base,
            rope_share=rope_share,
            rope_scaling=scaling,
            qk_norm=qk_norm,
            qk_norm_eps=qk_norm_eps,
            bias=bias,
            qkv_bias=qkv_bias,
            conv=conv,
            gate=gate,
            rescale_init=rescale_init,
            layer=layer,
            rngs=rngs,
        )

    def make_q(self, dim: int, width: int, layer: Layer, rngs: nnx.Rngs) -> Any:
        """Return a projection or a position table."""
        is_table = self.const == "qk"
        return Table(dim, width, layer, rngs=rngs) if is_table else super().make_q(dim, width, layer, rngs)

    def make_k(self, dim: int, width: int, layer: Layer, rngs: nnx.Rngs) -> Any:
        """Return a projection or a position table."""
        is_table = self.const != "none"
        return Table(dim, width, layer, rngs=rngs) if is_table else super().make_k(dim, width, layer, rngs)

    def normalize(self, q_BTHK: Array, k_BTGK: Array) -> tuple[Array, Array]:
        """Scale q and k to unit length if there is a temperature.

        There is no gain, because a gain would act as a second temperature.
        """
        if self.temperature is None:
            return super().normalize(q_BTHK, k_BTGK)
        return l2_normalize(q_BTHK).astype(q_BTHK.dtype), l2_normalize(k_BTGK).astype(k_BTGK.dtype)

    @property
    def scale(self) -> float | None:
        """The factor on the scores q . k; None means 1 / sqrt(K)."""
        return None if self.temperature is None else self.head_dim**0.5 / self.temperature

    def entropy(self, x_BTD: Array) -> Array:
        """Return the entropy of each query's weights in nats, float32 [B, T, H]."""
        q_BTHK, k_BTGK = self.queries_and_keys(x_BTD)
        e_BTH = self.weights_entropy(q_BTHK, jnp.broadcast_to(k_BTGK, (q_BTHK.shape[0], *k_BTGK.shape[1:])))
        return jnp.broadcast_to(e_BTH, (x_BTD.shape[0], *e_BTH.shape[1:]))

    def weights_entropy(self, q_BTHK: Array, k_BTGK: Array) -> Array:
        """Return the entropy of the weights in nats, float32 [B, T, H].

        Queries and keys are already rotated.
        """
        q_BTHK, k_BTGK = time_to_heads(q_BTHK), time_to_heads(k_BTGK)
        options: Any = {"window": self.window, "scale": self.scale, "slopes": self.slopes}
        return heads_to_time(attention_entropy(q_BTHK, k_BTGK, **options))

    @property
    def longest(self) -> int:
        """The number of table positions; 0 without a table."""
        return self.k.table.shape[0] if self.const != "none" else 0

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, segments: Array | None = None) -> Array:
        """Return `ops.attention.causal_attention`; k or q from a table have batch size 1."""
        options: Any = {"window": self.window, "scale": self.scale, "slopes": self.slopes}
        if self.const == "qk" and segments is not None:
            raise UserError(
                "const='qk' computes one softmax for all sequences, but packed documents begin at different positions. "
                "Set config.data.reset=False, or const to 'none' or 'k'."
            )
        if self.const == "qk":
            return shared_attention(q_BTHK[0], k_BTGK[0], v_BTGK, **options)
        k_BTGK = jnp.broadcast_to(k_BTGK, v_BTGK.shape)
        return causal_attention(
            q_BTHK, k_BTGK, v_BTGK, segments=segments, implementation=self.implementation, **options
        )

    def extend(self, cache: Any, k_BTGK: Array, v_BTGK: Array) -> Any:
        """Return the cache with T more keys and values."""
        return super().extend(cache, jnp.broadcast_to(k_BTGK, v_BTGK.shape), v_BTGK)

    def attend_after(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: Any) -> tuple[Array, Any]:
        """Attend from T new tokens to the cache and to each other, causally.

        Returns [B, T, H, K] and the extended cache.
        """
        start, slots, n_new = cache.length, cache.k_BSGK.shape[1], v_BTGK.shape[1]
        extended, positions_S = self.extend(cache, k_BTGK, v_BTGK), jnp.arange(slots)
        k_BSGK, v_BSGK = extended.k_BSGK, extended.v_BSGK
        if self.window:  # New tokens overwrite slots that the first of them still attend to, so both are needed.
            k_BTGK = jnp.broadcast_to(k_BTGK, v_BTGK.shape)
            k_BSGK, v_BSGK = (
                jnp.concatenate([old, new.astype(old.dtype)], axis=1)
                for old, new in ((cache.k_BSGK, k_BTGK), (cache.v_BSGK, v_BTGK))
            )
            positions_S = jnp.concatenate([positions_of_slots(start, slots), start + jnp.arange(n_new)])
        q_BTHK = jnp.broadcast_to(q_BTHK, (v_BTGK.shape[0], *q_BTHK.shape[1:]))

        def attend(q_BtHK: Array, positions_t: Array) -> Array:
            options: Any = {"window": self.window, "scale": self.scale, "slopes": self.slopes}
            return attention_at(q_BtHK, k_BSGK, v_BSGK, positions_t, positions_S, **options)

        return in_groups(attend, q_BTHK, start + jnp.arange(n_new)), extended

    def attend_step(self, q_BHK: Array, cache) -> Array:
        """Attend from one query to the cache, which holds the last W tokens if there is a window; return [B, H, K]."""
        q_BHK = jnp.broadcast_to(q_BHK, (cache.k_BSGK.shape[0], *q_BHK.shape[1:]))
        return attention_step(q_BHK, cache.k_BSGK, cache.v_BSGK, cache.length, scale=self.scale, slopes=self.slopes)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of QK^T and PV over the unmasked keys, per token.

        With const="qk" the batch shares QK^T, which is not counted.
        """
        width = min(self.window or seq_len, seq_len)
        keys = width - width * (width - 1) / (2 * seq_len)
        return (2 if self.const == "qk" else 4) * self.heads * self.head_dim * keys
