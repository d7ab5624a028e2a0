"""PaTH attention: positions are products of data-dependent matrices.

    w_t = silu(conv3(x W_1 W_2)) of unit length per head;  beta_t = 2 sigmoid(x W_b + b_b), one per head
    H_t = I - beta_t w_t w_t^T;   o_i = sum_j softmax_j(q_i^T H_i H_{i-1} ... H_{j+1} k_j / sqrt(K)) v_j   for j <= i

W_1 W_2 has rank 32. Beta reaches 2, which lets H reflect; according to the paper, such products can track permutations,
which rotary positions cannot (Yang et al., arXiv 2505.16381; public implementation: flash-linear-attention,
`fla/layers/path_attn.py`). `forget_gate` selects the paper's PaTH-FoX, which adds FoX's sums of log gates to the
scores; as in the public code, they are divided by sqrt(K) too. At 768 x 12: 12 heads of 64, SwiGLU of 2048, RMSNorm
with eps 1e-6; 110.3M parameters, tied.

w, beta and the products are float32. The decoding cache keeps each key multiplied by the matrices of the later tokens,
in float32 because every new token changes it again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.mixers._attention import Attend, AttentionMixer
from seqjax.mixers.base import at_least
from seqjax.mixers.fox import forget
from seqjax.nn.layers import Linear, l2_normalize, project_float32
from seqjax.nn.short_conv import ShortConv
from seqjax.ops.attention import attention_step
from seqjax.ops.path_attention import path_attention, path_keys
from seqjax.types import Array, Layer


class PaTHCache(NamedTuple):
    """A `KVCache` with float32 keys that include the later tokens' matrices.

    It also holds the last inputs of w's convolution and the sums of log gates.
    """

    k_BSGK: Array
    v_BSGK: Array
    length: Array
    w_BWE: Array
    forgotten_BSH: Array | None


class PaTH(AttentionMixer):
    """Causal softmax attention with paths of Householder-like matrices."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; fewer = grouped-query attention; one path per key head
        head_dim: int | None = None,  # None = model width / heads
        path_rank: int = 32,  # rank of W_1 W_2
        conv_width: int = 3,  # taps of w's convolution
        forget_gate: bool = False,  # one per head and token, as in FoX
        qk_norm: bool = False,  # RMSNorm over each head's q and k
        norm_eps: float = 1e-6,  # of these norms
        chunk_size: int = 128,  # tokens per product of matrices; affects only the speed
        implementation: str | None = None,
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        at_least(1, path_rank=path_rank, conv_width=conv_width, chunk_size=chunk_size)
        self.chunk_size, self.implementation = chunk_size, implementation

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
            conv=False,
            layer=layer,
            rngs=rngs,
        )
        width = self.kv_heads * self.head_dim
        # As in fla's models, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = Linear(heads * self.head_dim, dim, axes=("heads", "embed"), rngs=rngs)
        self.w_in = Linear(dim, path_rank, axes=("embed", None), rngs=rngs)
        self.w_out = Linear(path_rank, width, axes=(None, "heads"), rngs=rngs)
        self.w_conv = ShortConv(width, width=conv_width, axis="heads", rngs=rngs)
        self.beta = Linear(dim, self.kv_heads, axes=("embed", "heads"), bias=True, rngs=rngs)
        self.forget = Linear(dim, heads, axes=("embed", "heads"), bias=True, rngs=rngs) if forget_gate else None

    def path(self, x_BTD: Array, cache: Any) -> tuple[tuple[Array, ...], Any]:
        """Return w [B, T, G, K], beta [B, T, G] and the extended cache.

        With `forget_gate` the scaled log gates [B, T, H] follow beta. All are float32.
        """
        w_BTE, w_BWE = self.w_conv.extend(self.w_out(self.w_in(x_BTD)), None if cache is None else cache.w_BWE)
        w_BTGK = l2_normalize(w_BTE.reshape(*x_BTD.shape[:2], self.kv_heads, self.head_dim))
        beta_BTG = 2 * jax.nn.sigmoid(project_float32(self.beta, x_BTD))
        path = w_BTGK, beta_BTG
        if self.forget is not None:
            path += (jax.nn.log_sigmoid(project_float32(self.forget, x_BTD)) * self.head_dim**-0.5,)
        return path, None if cache is None else cache._replace(w_BWE=w_BWE)

    def mix(self, attend: Attend, x_BTD: Array, positions_T: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the mixer to tokens at consecutive positions.

        `attend` is `attend_sequence` or `attend_next`.
        """
        path, cache = self.path(x_BTD, cache)
        o_BTHK, cache = attend(*self.project(x_BTD, positions_T), cache, *path)
        return self.output(x_BTD, o_BTHK), cache

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, *path: Array) -> Array:
        """Return `ops.path_attention.path_attention`."""
        options = {"chunk_size": self.chunk_size, "implementation": self.implementation}
        return path_attention(q_BTHK, k_BTGK, v_BTGK, *path, **options)

    def init_attention_cache(self, batch: int, max_len: int, dtype: Any) -> PaTHCache:
        """Return an empty cache of `max_len` entries."""
        cache = super().init_attention_cache(batch, max_len, dtype)
        gates = None if self.forget is None else jnp.zeros((batch, max_len, self.heads), jnp.float32)
        k_BSGK = cache.k_BSGK.astype(jnp.float32)
        return PaTHCache(k_BSGK, cache.v_BSGK, cache.length, self.w_conv.init_cache(batch, dtype), gates)

    def extend(self, cache: PaTHCache, k_BTGK: Array, v_BTGK: Array, *path: Array) -> PaTHCache:
        """Return the cache with T more keys and values.

        All cached keys are multiplied by the new tokens' matrices.
        """
        w_BTGK, beta_BTG, *log_f = path
        k_BSGK, k_BTGK = path_keys(cache.k_BSGK, k_BTGK, w_BTGK, beta_BTG, chunk_size=self.chunk_size)
        if log_f and cache.forgotten_BSH is not None:
            forgotten_BSH, after_BTH = forget(cache.forgotten_BSH, *log_f)
            cache = cache._replace(forgotten_BSH=self.store(forgotten_BSH, after_BTH, cache.length))
        return super().extend(cache._replace(k_BSGK=k_BSGK), k_BTGK, v_BTGK)

    def attend_step(self, q_BHK: Array, cache: PaTHCache) -> Array:
        """Attend from one query to the cache; return [B, H, K]."""
        q_in_cache_BHK = q_BHK.astype(cache.k_BSGK.dtype)
        y_BHK = attention_step(q_in_cache_BHK, cache.k_BSGK, cache.v_BSGK, cache.length, cache.forgotten_BSH)
        return y_BHK.astype(q_BHK.dtype)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of QK^T, PV and the path products per token.

        Products within a chunk involve triangles. Each query is multiplied by one K x K matrix per earlier chunk.
        """
        width, chunk = self.head_dim, min(self.chunk_size, seq_len)
        own = 6 * width * chunk + 3 * chunk**2 + 2 * width**2
        before = (-(-seq_len // chunk) - 1) / 2
        return self.heads * (2 * width * (seq_len + 1) + own + 2 * width**2 * before)
