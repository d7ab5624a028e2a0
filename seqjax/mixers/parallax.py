"""Parallax: softmax attention with a learned first-order correction of its values.

    o = E_p[v] - Cov_p(r . k, v),   p = softmax(q . k / sqrt(K)),   r = RoPE(x W_r)

r is a second query with q's positions; r . k is not scaled. arXiv 2605.29157; public implementation:
flash-linear-attention, `fla/layers/parallax.py`. r = 0 is attention. At 768 x 12: 12 heads of 64, SwiGLU of 1792,
RMSNorm with eps 1e-6; 109.5M parameters, tied. The cache holds keys and values, as attention's. There is an XLA form
only: groups of 256 queries, recomputed in the backward pass (`ops/parallax.py`).
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.mixers._attention import AttentionMixer, Projection
from seqjax.nn.layers import Linear
from seqjax.ops.attention import attention_entropy, in_groups
from seqjax.ops.parallax import parallax_at
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array, Layer


class QueryPair(nnx.Module):
    """Two projections to queries; a head's q and r are neighbours, which keeps them on one device."""

    def __init__(self, dim: int, width: int, head_dim: int, *, rngs: nnx.Rngs):
        self.head_dim = head_dim
        self.q = Projection(dim, width, axes=("embed", "heads"), rngs=rngs)
        self.r = Projection(dim, width, axes=("embed", "heads"), rngs=rngs)

    def __call__(self, x_BTD: Array, positions_T: Array) -> Array:
        """Map [B, T, D] to [B, T, 2 * width]."""
        pair = [
            x.reshape(*x.shape[:2], -1, self.head_dim) for x in (self.q(x_BTD, positions_T), self.r(x_BTD, positions_T))
        ]
        return jnp.stack(pair, axis=3).reshape(*x_BTD.shape[:2], -1)


class Parallax(AttentionMixer):
    """Causal softmax attention, corrected by the covariance of values and a second score."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; fewer = grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10_000.0,
        qk_norm: bool = False,  # RMSNorm with a learned gain over each head's q, r and k, before RoPE
        gate: bool = False,  # multiplies the heads' output by sigmoid(x W), a gate per channel
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position=position,
            rope_base=rope_base,
            qk_norm=qk_norm,
            bias=False,
            conv=False,
            gate=gate,
            layer=layer,
            rngs=rngs,
        )
        self.r_norm = self.make_norm(heads, 1e-5, rngs) if qk_norm else None
        # As in fla's models, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = Linear(heads * self.head_dim, dim, axes=("heads", "embed"), rngs=rngs)

    def make_q(self, dim: int, width: int, layer: Layer, rngs: nnx.Rngs) -> Any:
        """Return the projections to q and r."""
        del layer
        return QueryPair(dim, width, self.head_dim, rngs=rngs)

    def normalize(self, q_BTHK: Array, k_BTGK: Array) -> tuple[Array, Array]:
        """Return queries and keys before rotation, normalised if `qk_norm` is set."""
        if self.q_norm is None or self.k_norm is None or self.r_norm is None:
            return q_BTHK, k_BTGK
        pair = self.q_norm(q_BTHK[:, :, ::2]), self.r_norm(q_BTHK[:, :, 1::2])
        return jnp.stack(pair, axis=3).reshape(q_BTHK.shape), self.k_norm(k_BTGK)

    def queries_and_keys(self, x_BTD: Array) -> tuple[Array, Array]:
        """Return the queries q [B, T, H, K] and keys [B, T, G, K] of a whole sequence."""
        pairs_BTHK, k_BTGK = super().queries_and_keys(x_BTD)
        return pairs_BTHK[:, :, ::2], k_BTGK

    def entropy(self, x_BTD: Array) -> Array:
        """Return the entropy of each query's weights p in nats, float32 [B, T, H]."""
        return heads_to_time(attention_entropy(*(time_to_heads(x) for x in self.queries_and_keys(x_BTD))))

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> Array:
        """Attend causally over a whole sequence; return [B, T, H, K]. q and r alternate in `q_BTHK`."""
        del gates
        return self._attend_from(q_BTHK, k_BTGK, v_BTGK, jnp.arange(q_BTHK.shape[1]))

    def _attend_from(self, q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, positions_T: Array) -> Array:
        @jax.checkpoint
        def attend(pair_BtHE: Array, positions_t: Array) -> Array:
            q_BtHK, r_BtHK = jnp.split(pair_BtHE, 2, axis=-1)
            return parallax_at(q_BtHK, r_BtHK, k_BSGK, v_BSGK, positions_t, jnp.arange(k_BSGK.shape[1]))

        pair_BTHE = q_BTHK.reshape(*q_BTHK.shape[:2], -1, 2 * self.head_dim)
        return in_groups(attend, pair_BTHE, positions_T)

    def attend_after(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: Any, *gates: Array) -> tuple[Array, Any]:
        """Attend from T new tokens to the cache and to each other, causally.

        Returns [B, T, H, K] and the extended cache.
        """
        del gates
        new_T = cache.length + jnp.arange(v_BTGK.shape[1])
        cache = self.extend(cache, k_BTGK, v_BTGK)
        return self._attend_from(q_BTHK, cache.k_BSGK, cache.v_BSGK, new_T), cache

    def attend_step(self, q_BHK: Array, cache: Any) -> Array:
        """Attend from one query to the cache; return [B, H, K]."""
        return self._attend_from(q_BHK[:, None], cache.k_BSGK, cache.v_BSGK, cache.length[None] - 1)[:, 0]

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of the two scores and the weighted sum, per token."""
        return 6 * self.heads * self.head_dim * (seq_len + 1) / 2
