"""Transformer++ attention: RoPE on q and k, no biases, causal softmax over everything or over a window.

o_i = sum_j softmax_j(q_i . k_j / sqrt(K)) v_j for 0 <= i - j < W (arXiv 2505.18522, section 2 and Appendix A). With
RMSNorm and GeGLU around it this is the paper's Transformer++ (109.5M parameters at 768 x 12, tied); `window=256` is
its sliding-window model.

Ablations (section 3): `position` (rope, alibi, none), `const` (keys, or queries and keys, from a trained table over
positions, where sequences end), `temperature` (q and k of unit length, scores sqrt(K) / temperature times their cosine;
the entropy of the weights is `Mixer.entropy`).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers._attention import AttentionConfig, AttentionMixer
from seqjax.nn.layers import normal
from seqjax.nn.params import param
from seqjax.ops.attention import attention_entropy, attention_step, causal_attention
from seqjax.ops.shared_attention import shared_attention
from seqjax.types import Array, LayerSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """`window` counts the query's own position; 0 sees the whole past."""

    window: int = 0
    const: str = "none"  # none | k | qk: keys (and queries) are a trained table over positions
    temperature: float = 0.0  # of unit queries and keys; 0 = ordinary scores
    implementation: str | None = None  # None (choose) | cudnn | xla

    def check(self, *, dim: int, seq_len: int) -> None:
        """Raise `UserError` where these settings do not fit the model."""
        super().check(dim=dim, seq_len=seq_len)
        if self.window < 0:
            raise UserError(f"config.model.mixer.window={self.window}: give the keys a query sees, or 0 for all.")
        if self.const not in ("none", "k", "qk"):
            raise UserError(f"config.model.mixer.const={self.const!r} must be one of none, k, qk.")
        if self.const == "qk" and self.implementation == "cudnn":
            raise UserError(
                "config.model.mixer.implementation='cudnn' computes a softmax per sequence; const='qk' needs one for "
                "all of them: None or 'xla'."
            )
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"config.model.mixer.temperature={self.temperature}: a positive number, or 0 for none.")
        if self.temperature and self.qk_norm:
            raise UserError(
                "config.model.mixer.temperature already normalises q and k; set config.model.mixer.qk_norm=False."
            )


class Table(nnx.Module):
    """Queries or keys by position, whatever the input; as spread as those that an input gives at the start."""

    def __init__(self, spec: LayerSpec, width: int, *, rngs: nnx.Rngs):
        self.table = param(rngs, normal(0.02 * math.sqrt(spec.dim)), (spec.max_len, width), ("positions", "heads"))

    def __call__(self, x_BTD: Array, positions_T: Array) -> Array:
        """The rows at some positions, [1, T, width] in the dtype of `x_BTD`: one for all sequences of the batch."""
        return self.table[...][positions_T].astype(x_BTD.dtype)[None]


class Mixer(AttentionMixer):
    """Softmax attention."""

    def make_q(self, spec: LayerSpec, width: int, rngs: nnx.Rngs) -> Any:
        """A projection, or a table."""
        return Table(spec, width, rngs=rngs) if self.config.const == "qk" else super().make_q(spec, width, rngs)

    def make_k(self, spec: LayerSpec, width: int, rngs: nnx.Rngs) -> Any:
        """A projection, or a table."""
        return Table(spec, width, rngs=rngs) if self.config.const != "none" else super().make_k(spec, width, rngs)

    def normalise(self, q_BTHK: Array, k_BTGK: Array) -> tuple[Array, Array]:
        """To unit length where there is a temperature: no gain, which would be a temperature of its own."""
        if not self.config.temperature:
            return super().normalise(q_BTHK, k_BTGK)
        return _unit(q_BTHK), _unit(k_BTGK)

    @property
    def scale(self) -> float | None:
        """What multiplies q . k."""
        return self.head_dim**0.5 / self.config.temperature if self.config.temperature else None

    def entropy(self, x_BTD: Array) -> Array:
        """Entropy of every query's weights in nats, float32 [B, T, H]."""
        q, k, _ = self.project(x_BTD, jnp.arange(x_BTD.shape[1]), x_BTD.shape[1])
        e_BTH = self.entropy_of(q, jnp.broadcast_to(k, (q.shape[0], *k.shape[1:])))
        return jnp.broadcast_to(e_BTH, (x_BTD.shape[0], *e_BTH.shape[1:]))

    def entropy_of(self, q_BTHK: Array, k_BTGK: Array) -> Array:
        """The same from queries and keys that are projected, normalised and rotated."""
        return attention_entropy(q_BTHK, k_BTGK, window=self.window, scale=self.scale, slopes=self.slopes)

    @property
    def window(self) -> int:
        """Keys a query sees; 0 = all."""
        return self.config.window

    @property
    def longest(self) -> int:
        """Positions that the tables have; 0 = no table, no end."""
        return self.k.table.shape[0] if self.config.const != "none" else 0

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array) -> Array:
        """See `ops.attention.causal_attention`; keys, and queries with them, may be one row for the whole batch."""
        options: Any = {"window": self.window, "scale": self.scale, "slopes": self.slopes}
        if self.config.const == "qk":
            return shared_attention(q_BTHK[0], k_BTGK[0], v_BTGK, **options)
        k_BTGK = jnp.broadcast_to(k_BTGK, v_BTGK.shape)
        return causal_attention(q_BTHK, k_BTGK, v_BTGK, implementation=self.config.implementation, **options)

    def extend(self, cache: Any, k_BTGK: Array, v_BTGK: Array) -> Any:
        """The cache with T more keys and values."""
        return super().extend(cache, jnp.broadcast_to(k_BTGK, v_BTGK.shape), v_BTGK)

    def attend_step(self, q_BHK: Array, cache) -> Array:
        """One query over the cache."""
        q_BHK = jnp.broadcast_to(q_BHK, (cache.k_BSGK.shape[0], *q_BHK.shape[1:]))
        return attention_step(q_BHK, cache.k_BSGK, cache.v_BSGK, cache.length, scale=self.scale, slopes=self.slopes)

    def flops_per_token(self, seq_len: int) -> float:
        """QK^T (unless one serves the batch) and PV over the keys that the mask leaves, averaged over positions."""
        width = min(self.window or seq_len, seq_len)
        keys = width - width * (width - 1) / (2 * seq_len)
        return (2 if self.config.const == "qk" else 4) * self.config.heads * self.head_dim * keys


def _unit(x: Array) -> Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
