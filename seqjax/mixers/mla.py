"""MLA, multi-head latent attention: keys and values of all heads from one latent.

    q = x W_q, N + R per head;  with q_rank: q = RMSNorm(x W_a) W_b
    [c, e] = x W_kv, r + R;  c <- RMSNorm(c);  [k_h, v_h] = c W_h, N + V per head
    s_h = (q_h[:N] . k_h + q_h[N:] . e) / sqrt(N + R);  o_h = sum_j softmax_j(s_h) v_h

DeepSeek-V2, arXiv 2405.04434, section 2.1; public implementations: transformers, `models/deepseek_v3` and
`models/kimi_linear`. All heads share the key channels e, which have no norm. With `position="rope"`, e and q_h[N:] are
rotated in neighbouring pairs, as in DeepSeek's models; with `position="none"`, e stays in the scores, as in Kimi
Linear. `gate` multiplies the output by sigmoid(x W_g) per channel, as in Kimi K3. At 768 x 12: 12 heads with N = V =
64, R = 32 and r = 256, SwiGLU of 2176, RMSNorm with eps 1e-6; 109.8M parameters, tied.

The decoding cache holds only c and e, 288 numbers per token at these sizes. Decoding multiplies W_h into queries and
outputs instead of expanding the cache ("absorbed"): with W_h = [K_h, V_h],

    s_h = ([K_h q_h[:N], q_h[N:]] . [c, e]) / sqrt(N + R);  o_h = (sum_j softmax_j(s_h) c_j) V_h

This is attention with one key head of width r + R and values of width r.
"""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._attention import sigmoid_gate
from seqjax.nn.layers import Linear, RMSNorm, project_float32
from seqjax.ops.attention import attention_at, attention_entropy, attention_step, causal_attention, in_groups
from seqjax.ops.positions import rope, rope_angles
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array


class LatentCache(NamedTuple):
    """The latents [c, e] of the tokens seen so far, as one key head, and their number."""

    latent_BS1C: Array
    length: Array


class MLA(base.Mixer):
    """Causal softmax attention with keys and values from a latent."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        head_dim: int | None = None,  # N, key channels per head; None = model width / heads
        shared_dim: int | None = None,  # R, key channels that all heads share; None = half of head_dim
        value_head_dim: int | None = None,  # V, value channels per head; None = head_dim
        kv_rank: int | None = None,  # r, width of the latent; None = a third of the model width
        q_rank: int | None = None,  # width of a latent for the queries; None = no such latent
        position: Literal["rope", "none"] = "rope",  # of the shared channels
        rope_base: float = 10_000.0,
        gate: bool = False,  # multiplies the heads' output by sigmoid(x W), a gate per channel
        norm_eps: float = 1e-6,  # of the latents
        implementation: Literal["cudnn", "splash", "xla", "chunked"] | None = None,  # None = chosen by device
        rngs: nnx.Rngs,
    ):
        sizes = {"head_dim": head_dim, "shared_dim": shared_dim, "value_head_dim": value_head_dim}
        base.at_least(1, heads=heads, **sizes, kv_rank=kv_rank, q_rank=q_rank)
        if head_dim is None and dim % heads:
            raise UserError(
                f"heads={heads} does not divide {base.size(dim=dim)}; choose heads that do, or set head_dim."
            )
        if not 0 < rope_base < float("inf"):
            raise UserError(
                f"rope_base must be positive and finite, not {rope_base}; for no rotation, set position=none."
            )
        if not 0 < norm_eps < 1:
            raise UserError(f"norm_eps={norm_eps} must be between 0 and 1.")
        self.heads, self.own_dim = heads, head_dim or dim // heads
        self.shared_dim = max(1, self.own_dim // 2) if shared_dim is None else shared_dim
        self.value_dim, self.rank = value_head_dim or self.own_dim, kv_rank or max(1, dim // 3)
        if position == "rope" and self.shared_dim % 2:
            raise UserError(
                f"shared_dim={self.shared_dim} must be even, because position=rope rotates pairs; set an even "
                "shared_dim, or position=none."
            )
        self.position, self.rope_base, self.implementation = position, rope_base, implementation
        self.scale = (self.own_dim + self.shared_dim) ** -0.5
        q_width, value_width = heads * (self.own_dim + self.shared_dim), heads * self.value_dim
        self.q_in = Linear(dim, q_rank, axes=("embed", "rank"), rngs=rngs) if q_rank else None
        self.q_norm = RMSNorm(q_rank, eps=norm_eps, axis=None, rngs=rngs) if q_rank else None
        self.q = Linear(q_rank or dim, q_width, axes=("rank" if q_rank else "embed", "heads"), rngs=rngs)
        self.kv_in = Linear(dim, self.rank + self.shared_dim, axes=("embed", "rank"), rngs=rngs)
        self.kv_norm = RMSNorm(self.rank, eps=norm_eps, axis=None, rngs=rngs)
        self.kv = Linear(self.rank, heads * (self.own_dim + self.value_dim), axes=("rank", "heads"), rngs=rngs)
        # As in the public models, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = Linear(value_width, dim, axes=("heads", "embed"), rngs=rngs)
        self.gate = Linear(dim, value_width, axes=("embed", "heads"), rngs=rngs) if gate else None

    def _rotated(self, x_BTHR: Array, positions_T: Array, max_len: int) -> Array:
        """Return the shared channels, rotated with RoPE.

        The rotated pairs (0, 1), (2, 3), ... are moved to halves, the order of `rope`. Queries and keys have the same
        order, so the scores do not change.
        """
        if self.position == "none":
            return x_BTHR
        angles = rope_angles(positions_T, head_dim=self.shared_dim, base=self.rope_base, max_len=max_len)
        halves_BTHR = jnp.concatenate([x_BTHR[..., ::2], x_BTHR[..., 1::2]], axis=-1)
        return rope(halves_BTHR, *angles)

    def _queries(self, x_BTD: Array, positions_T: Array, max_len: int) -> tuple[Array, Array]:
        """Return the queries of the heads' keys [B, T, H, N] and of the shared channels [B, T, H, R]."""
        if self.q_in is not None and self.q_norm is not None:
            x_BTD = self.q_norm(self.q_in(x_BTD))
        q_BTHK = self.q(x_BTD).reshape(*x_BTD.shape[:2], self.heads, -1)
        shared_BTHR = self._rotated(q_BTHK[..., self.own_dim :], positions_T, max_len)
        return q_BTHK[..., : self.own_dim], shared_BTHR

    def _latents(self, x_BTD: Array, positions_T: Array, max_len: int) -> Array:
        """Return the latents [c, e] with c normed and e rotated, [B, T, 1, r + R]."""
        ce_BTC = self.kv_in(x_BTD)
        e_BT1R = self._rotated(ce_BTC[:, :, None, self.rank :], positions_T, max_len)
        return jnp.concatenate([self.kv_norm(ce_BTC[..., : self.rank])[:, :, None], e_BT1R], axis=-1)

    def _keys_and_values(self, latent_BT1C: Array) -> tuple[Array, Array]:
        """Return the heads' keys [B, T, H, N + R] and values [B, T, H, V]."""
        c_BTr, e_BT1R = latent_BT1C[:, :, 0, : self.rank], latent_BT1C[..., self.rank :]
        kv_BTHx = self.kv(c_BTr).reshape(*c_BTr.shape[:2], self.heads, -1)
        e_BTHR = jnp.broadcast_to(e_BT1R, (*kv_BTHx.shape[:3], self.shared_dim))
        return jnp.concatenate([kv_BTHx[..., : self.own_dim], e_BTHR], axis=-1), kv_BTHx[..., self.own_dim :]

    def _absorbed(self, q_BTHN: Array, shared_BTHR: Array) -> Array:
        """Return the queries of the latents, [B, T, H, r + R]."""
        k_rHN = self.kv.w[...].reshape(self.rank, self.heads, -1)[..., : self.own_dim].astype(q_BTHN.dtype)
        return jnp.concatenate([jnp.einsum("bthn,rhn->bthr", q_BTHN, k_rHN), shared_BTHR], axis=-1)

    def _output(self, x_BTD: Array, o_BTHV: Array) -> Array:
        y_BTE = o_BTHV.reshape(*x_BTD.shape[:2], -1)
        if self.gate is not None:
            y_BTE = sigmoid_gate(project_float32(self.gate, x_BTD), y_BTE)
        return self.out(y_BTE)

    def _output_of_latents(self, x_BTD: Array, o_BTHr: Array) -> Array:
        """Return the output of the heads' mean latents."""
        v_rHV = self.kv.w[...].reshape(self.rank, self.heads, -1)[..., self.own_dim :].astype(o_BTHr.dtype)
        return self._output(x_BTD, jnp.einsum("bthr,rhv->bthv", o_BTHr, v_rHV))

    def _whole(self, x_BTD: Array) -> tuple[Array, Array, Array, Array]:
        """Return queries, keys and values of a whole sequence, and its latents."""
        seq_len = x_BTD.shape[1]
        positions_T = jnp.arange(seq_len)
        q_BTHK = jnp.concatenate(self._queries(x_BTD, positions_T, seq_len), axis=-1)
        latent_BT1C = self._latents(x_BTD, positions_T, seq_len)
        return q_BTHK, *self._keys_and_values(latent_BT1C), latent_BT1C

    def __call__(self, x_BTD: Array) -> Array:
        """Apply the parallel form: [B, T, D] to [B, T, D]."""
        return self._attend(x_BTD)[0]

    def _attend(self, x_BTD: Array) -> tuple[Array, Array]:
        *qkv, latent_BT1C = self._whole(x_BTD)
        q_BTHK, k_BTHK, v_BTHV = (time_to_heads(x) for x in qkv)
        o_BTHV = causal_attention(q_BTHK, k_BTHK, v_BTHV, scale=self.scale, implementation=self.implementation)
        return self._output(x_BTD, heads_to_time(o_BTHV)), latent_BT1C

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> LatentCache:
        """Return an empty cache of `max_len` latents."""
        shape = (batch, max_len, 1, self.rank + self.shared_dim)
        return LatentCache(jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    def _extend(self, cache: LatentCache, latent_BT1C: Array) -> LatentCache:
        latent_BS1C = lax.dynamic_update_slice_in_dim(
            cache.latent_BS1C, latent_BT1C.astype(cache.latent_BS1C.dtype), cache.length, 1
        )
        return LatentCache(latent_BS1C, cache.length + latent_BT1C.shape[1])

    def prefill(self, x_BTD: Array, cache: LatentCache) -> tuple[Array, LatentCache]:
        """Apply the parallel form to a prompt and fill an empty cache."""
        y_BTD, latent_BT1C = self._attend(x_BTD)
        return y_BTD, self._extend(cache, latent_BT1C)

    def _next(self, x_BTD: Array, cache: LatentCache) -> tuple[Array, Array, LatentCache]:
        """Return the absorbed queries and positions of tokens that continue a sequence, and the extended cache."""
        positions_T, slots = cache.length + jnp.arange(x_BTD.shape[1]), cache.latent_BS1C.shape[1]
        q_BTHC = self._absorbed(*self._queries(x_BTD, positions_T, slots))
        return q_BTHC, positions_T, self._extend(cache, self._latents(x_BTD, positions_T, slots))

    def prefill_next(self, x_BTD: Array, cache: LatentCache) -> tuple[Array, LatentCache]:
        """Apply the mixer to T tokens that continue the cached sequence."""
        q_BTHC, positions_T, cache = self._next(x_BTD, cache)
        keys_BS1C, positions_S = cache.latent_BS1C, jnp.arange(cache.latent_BS1C.shape[1])

        def attend(q_BtHC: Array, positions_t: Array) -> Array:
            values_BS1r = keys_BS1C[..., : self.rank]
            return attention_at(q_BtHC, keys_BS1C, values_BS1r, positions_t, positions_S, scale=self.scale)

        return self._output_of_latents(x_BTD, in_groups(attend, q_BTHC, positions_T)), cache

    def step(self, x_BD: Array, cache: LatentCache) -> tuple[Array, LatentCache]:
        """Apply the recurrent form to one token."""
        x_BTD = x_BD[:, None]
        q_BTHC, _, cache = self._next(x_BTD, cache)
        keys_BS1C = cache.latent_BS1C
        o_BHr = attention_step(q_BTHC[:, 0], keys_BS1C, keys_BS1C[..., : self.rank], cache.length, scale=self.scale)
        return self._output_of_latents(x_BTD, o_BHr[:, None])[:, 0], cache

    def queries_and_keys(self, x_BTD: Array) -> tuple[Array, Array]:
        """Return the queries and keys of a whole sequence, [B, T, H, N + R] each."""
        return self._whole(x_BTD)[:2]

    def entropy(self, x_BTD: Array) -> Array:
        """Return the entropy of each query's weights in nats, float32 [B, T, H]."""
        q_BTHK, k_BTHK = (time_to_heads(x) for x in self.queries_and_keys(x_BTD))
        return heads_to_time(attention_entropy(q_BTHK, k_BTHK, scale=self.scale))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of QK^T and PV over the unmasked keys, per token."""
        return 2 * self.heads * (self.own_dim + self.shared_dim + self.value_dim) * (seq_len + 1) / 2
