"""Wall attention: softmax attention with a decay per key channel in place of positions.

    g = log sigmoid(x W_g + b_g)  per channel;   s_ij = sum_n q_in k_jn e^{g_(j+1)n + ... + g_in} / sqrt(K)
    o_i = sum_j softmax_j(s_ij) v_j   for j <= i

Tilde Research; public implementation: flash-linear-attention, `fla/layers/wall_attn.py`. Without decay (g = 0) it is
attention without positions. b_g starts at 8, hence g near -3e-4. With `qk_norm`, each head has separate gains. At 768 x
12: 12 heads of 64, SwiGLU of 1792, RMSNorm with eps 1e-6; 109.5M parameters, tied. Log decays and their sums are
float32. The cache holds each key's sum of log decays in addition to keys and values. There is an XLA form only
(`ops/wall.py`). The public layer's window and scalar gate are left out.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.mixers._attention import Attend, AttentionMixer
from seqjax.nn.initializers import constant
from seqjax.nn.layers import Linear, RMSNorm, project_float32, save_inputs
from seqjax.nn.params import param
from seqjax.ops.wall import wall_attention
from seqjax.types import Array, Layer


class WallCache(NamedTuple):
    """A `KVCache` with the sum of log decays up to each key, float32."""

    k_BSGK: Array
    v_BSGK: Array
    length: Array
    decay_BSHK: Array


class Wall(AttentionMixer):
    """Causal softmax attention with a decay per channel."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; fewer = grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        qk_norm: bool = False,  # RMSNorm over each head's q and k, with a separate gain for each head
        gate: bool = False,  # multiplies the heads' output by sigmoid(x W), a gate per channel
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position="none",
            rope_base=1.0,
            qk_norm=qk_norm,
            bias=False,
            conv=False,
            gate=gate,
            layer=layer,
            rngs=rngs,
        )
        width = heads * self.head_dim
        # As in fla's models, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = Linear(width, dim, axes=("heads", "embed"), rngs=rngs)
        self.decay = Linear(dim, width, axes=("embed", "heads"), rngs=rngs)
        self.decay_bias_E = param(rngs, constant(8.0), (width,), ("heads",))

    def make_norm(self, heads: int, eps: float, rngs: nnx.Rngs) -> RMSNorm:
        """Return the RMSNorm for `heads` heads, with a separate gain for each head."""
        return RMSNorm(self.head_dim, eps=eps, axis="heads", heads=heads, rngs=rngs)

    def log_decay(self, x_BTD: Array) -> Array:
        """Return the log decays, float32 [B, T, H, K]."""
        g_BTE = jax.nn.log_sigmoid(project_float32(self.decay, x_BTD) + self.decay_bias_E[...])
        return g_BTE.reshape(*x_BTD.shape[:2], self.heads, -1)

    def mix(self, attend: Attend, x_BTD: Array, positions_T: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the mixer to tokens at consecutive positions."""
        g_BTHK = save_inputs(self.log_decay)(x_BTD)
        o_BTHK, cache = attend(*self.project(x_BTD, positions_T), cache, g_BTHK)
        return self.output(x_BTD, o_BTHK), cache

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> Array:
        """Attend causally over a whole sequence; return [B, T, H, K]."""
        return wall_attention(q_BTHK, k_BTGK, v_BTGK, jnp.cumsum(gates[0], axis=1))

    def init_attention_cache(self, batch: int, max_len: int, dtype: Any) -> WallCache:
        """Return an empty cache of `max_len` entries."""
        cache = super().init_attention_cache(batch, max_len, dtype)
        decay_BSHK = jnp.zeros((batch, max_len, self.heads, self.head_dim), jnp.float32)
        return WallCache(cache.k_BSGK, cache.v_BSGK, cache.length, decay_BSHK)

    def extend(self, cache: WallCache, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> WallCache:
        """Return the cache with T more keys, values and sums of log decays."""
        last = jnp.maximum(cache.length - 1, 0)  # the sums of an empty cache are 0
        before_B1HK = jax.lax.dynamic_slice_in_dim(cache.decay_BSHK, last, 1, axis=1)
        decay_BSHK = self.store(cache.decay_BSHK, before_B1HK + jnp.cumsum(gates[0], axis=1), cache.length)
        return super().extend(cache, k_BTGK, v_BTGK)._replace(decay_BSHK=decay_BSHK)

    def attend_after(
        self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: WallCache, *gates: Array
    ) -> tuple[Array, WallCache]:
        """Attend from T new tokens to the cache and to each other, causally.

        Returns [B, T, H, K] and the extended cache.
        """
        start, cache = cache.length, self.extend(cache, k_BTGK, v_BTGK, *gates)
        return wall_attention(q_BTHK, cache.k_BSGK, cache.v_BSGK, cache.decay_BSHK, start), cache

    def attend_step(self, q_BHK: Array, cache: WallCache) -> Array:
        """Attend from one query to the cache; return [B, H, K]."""
        operands = q_BHK[:, None], cache.k_BSGK, cache.v_BSGK, cache.decay_BSHK
        return wall_attention(*operands, cache.length - 1)[:, 0]

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of the scores and the weighted sum, per token."""
        return 4 * self.heads * self.head_dim * (seq_len + 1) / 2
