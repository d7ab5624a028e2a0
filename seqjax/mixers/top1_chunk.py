"""Top-1 Chunk: each query attends to its local chunk and to one selected chunk of the past, or to `top_k` of them.

With chunks of C tokens, query i sees the keys of its own chunk up to itself and of the past chunk c*, in one softmax
(arXiv 2505.18522, section 5). Exact: c* = argmax_c sum_{j in c} exp(s_ij), the chunk with the most probability mass.
Approx: c* = argmax_c q_i . mean_{j in c} k_j, a first-order approximation of it. Best key, which the paper does not
have: c* = argmax_c max_{j in c} s_ij, the chunk of the key that full attention weighs most. Random, a control: c* is a
hash of the position and the head, the same in every layer. No gradient flows through the selection.

With `top_k` the softmax is over the k chunks of the largest scores and the own one, over all that there are for a query
with fewer past chunks. MoBA (arXiv 2502.13189) selects by the mean key too, on queries and keys without `qk_norm`, and
its top-k counts the own chunk: selection=approx with `top_k` one less.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import kernels_pallas
from seqjax.mixers._attention import AttentionMixer
from seqjax.types import Array, Layer
from seqjax.utils import UserError


class Top1Cache(NamedTuple):
    """A `KVCache` with, for approx, the float32 mean key of every complete chunk, otherwise None."""

    k_BSGK: Array
    v_BSGK: Array
    length: Array
    mean_BcGK: Array | None


class Top1Chunk(AttentionMixer):
    """Attention to the local chunk and to one selected past chunk, or to `top_k` of them."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = as many as heads; fewer is grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        # With "none", only the causal mask and config.model.learned_positions carry position information.
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10_000.0,
        qk_norm: bool = True,  # RMSNorm with a learned gain over each head's q and k, before RoPE
        bias: bool = False,
        conv: bool = False,  # adds a convolution over 4 tokens to each of q, k and v, before QK norm and RoPE
        chunk_size: int = 128,
        # exact and best_key score every past key, approx one mean key per chunk; random reads no key, as a control
        selection: Literal["exact", "best_key", "approx", "random"] = "exact",
        top_k: int = 1,  # the number of past chunks that a query reads; above 1 on XLA alone
        implementation: str | None = None,
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        if not 1 <= chunk_size <= layer.max_len:
            raise UserError(
                f"chunk_size={chunk_size} does not fit max_len={layer.max_len}: choose a chunk of 1 to {layer.max_len} "
                "tokens (the paper: 128), or longer sequences."
            )
        if top_k < 1:
            raise UserError(
                f"top_k={top_k} selects no past chunk: choose 1, as the paper does, or more; attention to near tokens "
                "alone is transformer_pp with a window."
            )
        self.chunk_size, self.selection, self.top_k, self.implementation = chunk_size, selection, top_k, implementation
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position=position,
            rope_base=rope_base,
            qk_norm=qk_norm,
            bias=bias,
            conv=conv,
            layer=layer,
            rngs=rngs,
        )

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array) -> Array:
        """Return `kernels_pallas.top1_chunk_attention` of the inputs, [B, T, H, K]."""
        return kernels_pallas.top1_chunk_attention(
            q_BTHK,
            k_BTGK,
            v_BTGK,
            chunk_size=self.chunk_size,
            selection=self.selection,
            top_k=self.top_k,
            implementation=self.implementation,
        )

    def init_attention_cache(self, batch: int, max_len: int, dtype: Any) -> Top1Cache:
        """Return an empty cache of `max_len` entries."""
        cache = super().init_attention_cache(batch, max_len, dtype)
        mean_BcGK = None
        if self.selection == "approx":
            n_chunks = max_len // self.chunk_size
            mean_BcGK = jnp.zeros((batch, n_chunks, self.kv_heads, self.head_dim), jnp.float32)
        return Top1Cache(cache.k_BSGK, cache.v_BSGK, cache.length, mean_BcGK)

    def extend(self, cache: Top1Cache, k_BTGK: Array, v_BTGK: Array) -> Top1Cache:
        """Return the cache with more keys and values, and with the mean keys of the chunks that they complete."""
        cache = super().extend(cache, k_BTGK, v_BTGK)
        if cache.mean_BcGK is None:
            return cache
        if k_BTGK.shape[1] > 1:
            mean_BcGK = kernels_pallas.chunk_means(cache.k_BSGK, chunk_size=self.chunk_size)
        else:
            mean_BcGK = kernels_pallas.update_chunk_means(
                cache.mean_BcGK, cache.k_BSGK, cache.length, chunk_size=self.chunk_size
            )
        return cache._replace(mean_BcGK=mean_BcGK)

    def attend_after(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: Top1Cache) -> tuple[Array, Top1Cache]:
        """Let T queries attend to the cache and to the keys before them; return [B, T, H, K] and the new cache."""
        lengths_T = cache.length + 1 + jnp.arange(v_BTGK.shape[1])
        cache = self.extend(cache, k_BTGK, v_BTGK)
        # Under vmap, XLA scores all queries in one product; a kernel would get the cache once per query.
        attend = jax.vmap(functools.partial(self._decode, implementation="xla"), in_axes=(1, None, 0), out_axes=1)
        return attend(q_BTHK, cache, lengths_T), cache

    def attend_step(self, q_BHK: Array, cache: Top1Cache) -> Array:
        """Let one query attend to the cache; return [B, H, K]."""
        return self._decode(q_BHK, cache, cache.length)

    def _decode(self, q_BHK: Array, cache: Top1Cache, length: Array, *, implementation: str | None = None) -> Array:
        return kernels_pallas.top1_chunk_decode(
            q_BHK,
            cache.k_BSGK,
            cache.v_BSGK,
            length,
            chunk_size=self.chunk_size,
            selection=self.selection,
            top_k=self.top_k,
            chunk_mean_BcGK=cache.mean_BcGK,
            implementation=implementation,
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of the selection and of attention to the keys in use, averaged over positions."""
        return self._selection_flops(seq_len) + self._attention_flops(seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """Return the training FLOPs, in which the selection counts once because it has no backward."""
        return self._selection_flops(seq_len) + 3 * self._attention_flops(seq_len)

    def _selection_flops(self, seq_len: int) -> float:
        if self.selection == "random":
            return 0.0
        n_chunks, chunk = seq_len // self.chunk_size, self.chunk_size
        # The queries of chunk n score n past chunks; those of a trailing partial chunk score all.
        scored = chunk * n_chunks * (n_chunks - 1) / 2 + (seq_len - chunk * n_chunks) * n_chunks
        keys_per_chunk = 1 if self.selection == "approx" else chunk
        return 2 * self.heads * self.head_dim * keys_per_chunk * scored / seq_len

    def _attention_flops(self, seq_len: int) -> float:
        chunk = self.chunk_size
        n_chunks, remainder = divmod(seq_len, chunk)
        local = (n_chunks * chunk * (chunk + 1) + remainder * (remainder + 1)) / 2
        # The queries from chunk n on read an n-th selected chunk.
        remote = chunk * sum(seq_len - n * chunk for n in range(1, min(self.top_k, n_chunks) + 1))
        return 4 * self.heads * self.head_dim * (local + remote) / seq_len
