"""FoX, the Forgetting Transformer: softmax attention with forget gates.

    f_t = sigmoid(x_t W_f + b_f), one per head;   g_ij = sum of log f_l over j < l <= i
    o_i = sum_j softmax_j(q_i . k_j / sqrt(K) + g_ij) v_j   for j <= i, and i - j < W with a window

There is no position encoding. The sum g_ij includes the query's gate and excludes the key's gate (Lin et al., arXiv
2503.02130; public implementations: zhixuan-lin/forgetting-transformer and flash-linear-attention,
`fla/layers/forgetting_attn.py`). b_f starts at 0, hence gates start near 1/2. At 768 x 12: 12 heads of 64, SwiGLU of
2048, RMSNorm with eps 1e-6; 109.6M parameters, tied.

The paper's Pro block is `kv_shift`, `qk_norm` and `output_gate` with an MLP of 1792 (109.9M):

    k'_t = a_t k_{t-1} + (1 - a_t) k_t,  a = sigmoid(x W_a) per head, k_{-1} = 0;  v likewise with separate gates
    q, k <- RMSNorm(q), RMSNorm(k) per head;   out = (RMSNorm(o) per head * sigmoid(x W_g)) W_o

Its norms have separate gains for each head. Gates, their sums and norms are float32. The decoding cache keeps, for each
key, the sum of the log gates after it.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from seqjax.errors import UserError
from seqjax.mixers._attention import Attend, AttentionMixer, positions_of_slots
from seqjax.mixers._rwkv import token_shift
from seqjax.nn.layers import Linear, RMSNorm, project_float32, save_inputs
from seqjax.ops.attention import attention_at, attention_entropy, attention_step, causal_attention, in_groups
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array, Layer


class FoXCache(NamedTuple):
    """A `KVCache` with each key's sum of later log gates, float32.

    With `kv_shift` it also holds the last projections of k and v.
    """

    k_BSGK: Array
    v_BSGK: Array
    length: Array
    forgotten_BSH: Array
    k_BE: Array | None
    v_BE: Array | None


@save_inputs
def _shift(x_BTE: Array, last_BE: Array | None, gate_BTG: Array) -> Array:
    """Return a x_{t-1} + (1 - a) x_t with a = sigmoid(gate) per head.

    `last_BE` (default zero) precedes the first token.
    """
    share_BTG1 = jax.nn.sigmoid(gate_BTG)[..., None]
    x_BTGK, before_BTGK = (x.reshape(*gate_BTG.shape, -1) for x in (x_BTE, token_shift(x_BTE, last_BE)))
    y_BTGK = share_BTG1 * before_BTGK.astype(jnp.float32) + (1 - share_BTG1) * x_BTGK.astype(jnp.float32)
    return y_BTGK.reshape(x_BTE.shape).astype(x_BTE.dtype)


def forget(forgotten_BSH: Array, log_f_BTH: Array) -> tuple[Array, Array]:
    """Return the sums of log gates after cached keys and after T new keys.

    They are [B, S, H] and [B, T, H].
    """
    next_BTH = jnp.pad(log_f_BTH[:, 1:], ((0, 0), (0, 1), (0, 0)))
    after_BTH = lax.cumsum(next_BTH, axis=1, reverse=True)
    return forgotten_BSH + (log_f_BTH[:, :1] + after_BTH[:, :1]), after_BTH


class FoX(AttentionMixer):
    """Causal softmax attention with forget gates."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; fewer = grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        window: int | None = None,  # includes the query's own position; None = the whole past
        conv: bool = False,  # adds a convolution over 4 tokens to each of q, k and v, before the norms
        kv_shift: bool = False,  # mixes k and v with the previous token's, by data-dependent weights; not with conv
        qk_norm: bool = False,  # RMSNorm over each head's q and k, with a separate gain for each head
        output_gate: bool = False,  # RMSNorm over each head's output, and a sigmoid gate per channel
        norm_eps: float = 1e-6,  # of qk_norm and output_gate
        implementation: Literal["triton", "xla", "chunked"] | None = None,  # None = chosen by device and length
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        if window is not None and window < 1:
            raise UserError(f"window={window} must be at least 1; set the number of keys, or None for all.")
        if kv_shift and conv:
            raise UserError("kv_shift and conv both mix a key with earlier keys; set kv_shift=False or conv=False.")
        if not 0 < norm_eps < 1:
            raise UserError(f"norm_eps={norm_eps} must be between 0 and 1.")
        self.window, self.implementation = window or 0, implementation
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position="none",
            rope_base=1.0,
            qk_norm=qk_norm,
            qk_norm_eps=norm_eps,
            bias=False,
            conv=conv,
            layer=layer,
            rngs=rngs,
        )
        width, n_kv = heads * self.head_dim, self.kv_heads
        # As in fla's models, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = Linear(width, dim, axes=("heads", "embed"), rngs=rngs)
        self.forget = Linear(dim, heads, axes=("embed", "heads"), bias=True, rngs=rngs)
        self.k_shift = Linear(dim, n_kv, axes=("embed", "heads"), rngs=rngs) if kv_shift else None
        self.v_shift = Linear(dim, n_kv, axes=("embed", "heads"), rngs=rngs) if kv_shift else None
        self.norm = self.make_norm(heads, norm_eps, rngs) if output_gate else None
        if output_gate:
            self.gate = Linear(dim, width, axes=("embed", "heads"), rngs=rngs)

    def make_norm(self, heads: int, eps: float, rngs: nnx.Rngs) -> RMSNorm:
        """Return the RMSNorm for `heads` heads, with a separate gain for each head."""
        return RMSNorm(self.head_dim, eps=eps, axis="heads", heads=heads, rngs=rngs)

    def log_gates(self, x_BTD: Array) -> Array:
        """Return the log forget gates, float32 [B, T, H]."""
        return jax.nn.log_sigmoid(project_float32(self.forget, x_BTD))

    def shift(self, x_BTD: Array, k_BTE: Array, v_BTE: Array, cache: Any) -> tuple[Array, Array, Any]:
        """Apply `kv_shift`: mix keys and values with the previous token's.

        The cache (or None) stores the last unmixed projections.
        """
        if self.k_shift is None or self.v_shift is None:
            return k_BTE, v_BTE, cache
        last_k_BE, last_v_BE = (None, None) if cache is None else (cache.k_BE, cache.v_BE)
        if cache is not None:
            k_BE, v_BE = (x[:, -1].astype(cache.k_BE.dtype) for x in (k_BTE, v_BTE))
            cache = cache._replace(k_BE=k_BE, v_BE=v_BE)
        k_BTE = _shift(k_BTE, last_k_BE, project_float32(self.k_shift, x_BTD))
        v_BTE = _shift(v_BTE, last_v_BE, project_float32(self.v_shift, x_BTD))
        return k_BTE, v_BTE, cache

    def mix(self, attend: Attend, x_BTD: Array, positions_T: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the mixer to tokens at consecutive positions.

        `attend` is `attend_sequence` or `attend_next`.
        """
        q_BTE, k_BTE, v_BTE = self.project(x_BTD, positions_T)
        k_BTE, v_BTE, cache = self.shift(x_BTD, k_BTE, v_BTE, cache)
        o_BTHK, cache = self.convolve_and_attend(attend, q_BTE, k_BTE, v_BTE, cache, self.log_gates(x_BTD))
        return self.output(x_BTD, o_BTHK if self.norm is None else self.norm(o_BTHK)), cache

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> Array:
        """Return `ops.attention.causal_attention` with the log gates."""
        return causal_attention(q_BTHK, k_BTGK, v_BTGK, *gates, window=self.window, implementation=self.implementation)

    def init_attention_cache(self, batch: int, max_len: int, dtype: Any) -> FoXCache:
        """Return an empty cache of `max_len` entries, at most `window`."""
        cache = super().init_attention_cache(batch, max_len, dtype)
        forgotten_BSH = jnp.zeros((*cache.k_BSGK.shape[:2], self.heads), jnp.float32)
        last_BE = None if self.k_shift is None else jnp.zeros((batch, self.kv_heads * self.head_dim), dtype)
        return FoXCache(cache.k_BSGK, cache.v_BSGK, cache.length, forgotten_BSH, last_BE, last_BE)

    def extend(self, cache: FoXCache, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> FoXCache:
        """Return the cache with T more keys and values and updated log-gate sums."""
        forgotten_BSH, after_BTH = forget(cache.forgotten_BSH, *gates)
        forgotten_BSH = self.store(forgotten_BSH, after_BTH, cache.length)
        return super().extend(cache, k_BTGK, v_BTGK)._replace(forgotten_BSH=forgotten_BSH)

    def attend_after(
        self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: FoXCache, *gates: Array
    ) -> tuple[Array, FoXCache]:
        """Attend from T new tokens to the cache and to each other, causally.

        Returns [B, T, H, K] and the extended cache.
        """
        (log_f_BTH,) = gates
        new_T = cache.length + jnp.arange(v_BTGK.shape[1])
        # The sums count from the last cached token: minus the log gates up to a new key. The log gates from there to
        # the query are equal for all keys, so softmax cancels them.
        forgotten_BTH = -jnp.cumsum(log_f_BTH, axis=1)
        k_BSGK, v_BSGK, forgotten_BSH = (
            jnp.concatenate([old, new.astype(old.dtype)], axis=1)
            for old, new in (
                (cache.k_BSGK, k_BTGK),
                (cache.v_BSGK, v_BTGK),
                (cache.forgotten_BSH, forgotten_BTH),
            )
        )
        positions_S = jnp.concatenate([positions_of_slots(cache.length, cache.k_BSGK.shape[1]), new_T])

        def attend(q_BtHK: Array, positions_t: Array) -> Array:
            return attention_at(q_BtHK, k_BSGK, v_BSGK, positions_t, positions_S, forgotten_BSH, window=self.window)

        return in_groups(attend, q_BTHK, new_T), self.extend(cache, k_BTGK, v_BTGK, log_f_BTH)

    def attend_step(self, q_BHK: Array, cache: FoXCache) -> Array:
        """Attend from one query to the cache; return [B, H, K]."""
        return attention_step(q_BHK, cache.k_BSGK, cache.v_BSGK, cache.length, cache.forgotten_BSH)

    def queries_and_keys(self, x_BTD: Array) -> tuple[Array, Array]:
        """Return the queries [B, T, H, K] and keys [B, T, G, K] of a whole sequence.

        The forget gates are not included.
        """
        positions_T = jnp.arange(x_BTD.shape[1])
        q_BTE, k_BTE, v_BTE = self.project(x_BTD, positions_T)
        k_BTE, v_BTE, _ = self.shift(x_BTD, k_BTE, v_BTE, None)
        if self.conv is not None:
            q_BTE, k_BTE, v_BTE = self.conv(q_BTE, k_BTE, v_BTE)
        q_BTHK, k_BTGK, _ = self.split_heads(q_BTE, k_BTE, v_BTE, positions_T, x_BTD.shape[1])
        return q_BTHK, k_BTGK

    def entropy(self, x_BTD: Array) -> Array:
        """Return the entropy of each query's weights in nats, float32 [B, T, H]."""
        scored = (*self.queries_and_keys(x_BTD), self.log_gates(x_BTD))
        return heads_to_time(attention_entropy(*(time_to_heads(x) for x in scored), window=self.window))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of QK^T and PV over the unmasked keys, per token."""
        width = min(self.window or seq_len, seq_len)
        return 4 * self.heads * self.head_dim * (width - width * (width - 1) / (2 * seq_len))
