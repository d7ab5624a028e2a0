"""PaTH attention: the position of a key is a product of matrices that the tokens after it choose; no rotary positions.

    w_t = silu(conv3(x W_1 W_2)) of unit length per head;  beta_t = 2 sigmoid(x W_b + b_b), one per head
    H_t = I - beta_t w_t w_t^T;   o_i = sum_j softmax_j(q_i^T H_i H_{i-1} ... H_{j+1} k_j / sqrt(K)) v_j   for j <= i

W_1 W_2 has the rank 32. Beta is up to 2, so that H can reflect: by the paper such products follow permutations, and
rotary positions cannot (Yang et al., arXiv 2505.16381; `fla/layers/path_attn.py` of flash-linear-attention).
`forget_gate` makes it the paper's PaTH-FoX: scores have FoX's sums of log gates as well, which the public code divides
by sqrt(K), too. At 768 x 12: 12 heads of 64, SwiGLU of 2048, RMSNorm with eps 1e-6; 110.3M
parameters, tied.

w, beta and the products are float32. Decoding keeps every key after the tokens that came since, float32, because each
token changes it again.
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
    """A `KVCache` with float32 keys after their paths, the last inputs of w's convolution, and the sums of gates."""

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
        kv_heads: int | None = None,  # None = as many as heads; fewer is grouped-query attention, with as many paths
        head_dim: int | None = None,  # None = model width / heads
        path_rank: int = 32,  # of the matrix that makes w
        conv_width: int = 3,  # taps of w's convolution
        forget_gate: bool = False,  # one per head and token, as in FoX
        qk_norm: bool = False,  # RMSNorm over each head's q and k
        norm_eps: float = 1e-6,  # of these norms
        chunk_size: int = 128,  # tokens whose matrices are multiplied at once; changes the speed alone
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
        # Unlike GPT, fla's models do not scale the initial values of this matrix down.
        self.out = Linear(heads * self.head_dim, dim, axes=("heads", "embed"), rngs=rngs)
        self.w_in = Linear(dim, path_rank, axes=("embed", None), rngs=rngs)
        self.w_out = Linear(path_rank, width, axes=(None, "heads"), rngs=rngs)
        self.w_conv = ShortConv(width, width=conv_width, axis="heads", rngs=rngs)
        self.beta = Linear(dim, self.kv_heads, axes=("embed", "heads"), bias=True, rngs=rngs)
        self.forget = Linear(dim, heads, axes=("embed", "heads"), bias=True, rngs=rngs) if forget_gate else None

    def path(self, x_BTD: Array, cache: Any) -> tuple[tuple[Array, ...], Any]:
        """Return w [B, T, G, K], beta [B, T, G] and perhaps scaled log gates [B, T, H], float32, and the new cache."""
        w_BTE, w_BWE = self.w_conv.extend(self.w_out(self.w_in(x_BTD)), None if cache is None else cache.w_BWE)
        w_BTGK = l2_normalize(w_BTE.reshape(*x_BTD.shape[:2], self.kv_heads, self.head_dim))
        beta_BTG = 2 * jax.nn.sigmoid(project_float32(self.beta, x_BTD))
        path = w_BTGK, beta_BTG
        if self.forget is not None:
            path += (jax.nn.log_sigmoid(project_float32(self.forget, x_BTD)) * self.head_dim**-0.5,)
        return path, None if cache is None else cache._replace(w_BWE=w_BWE)

    def mix(self, attend: Attend, x_BTD: Array, positions_T: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the mixer, whose projections and paths `attend`, to tokens at consecutive positions."""
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
        """Return the cache with T more keys and values, and every key after the paths of what follows it."""
        w_BTGK, beta_BTG, *log_f = path
        k_BSGK, k_BTGK = path_keys(cache.k_BSGK, k_BTGK, w_BTGK, beta_BTG, chunk_size=self.chunk_size)
        if log_f and cache.forgotten_BSH is not None:
            forgotten_BSH, after_BTH = forget(cache.forgotten_BSH, *log_f)
            cache = cache._replace(forgotten_BSH=self.store(forgotten_BSH, after_BTH, cache.length))
        return super().extend(cache._replace(k_BSGK=k_BSGK), k_BTGK, v_BTGK)

    def attend_step(self, q_BHK: Array, cache: PaTHCache) -> Array:
        """Let one query attend to the cache; return [B, H, K]."""
        q_in_cache_BHK = q_BHK.astype(cache.k_BSGK.dtype)
        y_BHK = attention_step(q_in_cache_BHK, cache.k_BSGK, cache.v_BSGK, cache.length, cache.forgotten_BSH)
        return y_BHK.astype(q_BHK.dtype)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of QK^T and PV over the unmasked keys, and of the products of paths, per token.

        Those within a chunk are of triangles; queries meet one matrix K x K for each chunk before theirs.
        """
        width, chunk = self.head_dim, min(self.chunk_size, seq_len)
        own = 6 * width * chunk + 3 * chunk**2 + 2 * width**2
        before = (-(-seq_len // chunk) - 1) / 2
        return self.heads * (2 * width * (seq_len + 1) + own + 2 * width**2 * before)
