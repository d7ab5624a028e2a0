"""NSA, Native Sparse Attention: block means, a few selected blocks, and a window.

With blocks of b keys, a window of w keys, R = H / G query heads per key head, and RoPE on q and k first:

    compressed  o_c = sum_j p_j vbar_j,  p = softmax_j(q . kbar_j / sqrt(K)), over the blocks j that end at or before
                the query; kbar_j and vbar_j are block means; o_c = 0 if there is no such block
    selected    o_s = causal softmax attention to the keys of n blocks: the query's block, the block before it, the
                first block, and the blocks with the largest p, averaged over the R heads, which share the selection
    window      o_w = softmax attention to the last w keys, including the query's key
    y = (g_c o_c + g_s o_s + g_w o_w) W_o,   g = sigmoid(x W_g), one for each head and branch

No gradient flows through the selection; ties go to the lowest block index (Yuan et al., arXiv 2502.11089; public
implementation: flash-linear-attention, `fla/ops/nsa/naive.py`, `fla/layers/nsa.py`). As in the public code, the
compressed and selected branches use the same blocks, a block is compressed by its mean, and the branches share k and v.
The paper uses overlapping blocks, an MLP with positions inside a block, and separate keys and values per branch. The
public kernels require R to be a power of two, at least 16; here any R works.

The defaults b = 64, n = 16, w = 512 come from the paper, for sequences of 8,192 tokens and more; configs/nsa.py has
smaller values for shorter sequences. At width 768 and 12 layers: 12 heads of 64, 3 key heads, SwiGLU of 2432; 109.9M
parameters, tied.

The compressed branch, with the selection, is `kernels_pallas.compressed_attention`. Its means, scores and p are
float32, and the backward pass recomputes the scores. The selected branch is `kernels_pallas.selected_chunk_attention`.

Suffix letters in addition to the usual ones: c, blocks; n, selected blocks; R, query heads per key head; t, queries of
one group; M, gathered keys, (n + 1) b; W, cache slots that the window branch reads; J, the three branches; X, their
concatenated channels, 3 K.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import kernels_pallas
from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._attention import Attend, AttentionMixer
from seqjax.nn.layers import Linear, project_float32, save_choice, save_inputs
from seqjax.ops.attention import attention_at, causal_attention, in_groups
from seqjax.types import Array, Layer


class NSACache(NamedTuple):
    """A `KVCache` with the float32 mean key and value of each complete block."""

    k_BSGK: Array
    v_BSGK: Array
    length: Array
    k_mean_BcGK: Array
    v_mean_BcGK: Array


def selected_attention_at(
    q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, positions_T: Array, sel_BTGn: Array, *, block_size: int
) -> Array:
    """Return attention of cached queries to their own and their selected blocks.

    The result is [B, T, H, K]. `positions_T` may be any positions, and the key at position p is in slot p. Each query's
    keys are gathered separately, [B, T, G, (n + 1) b, K].
    """
    n_batch, n_queries, n_kv = sel_BTGn.shape[:3]
    own_BTG1 = jnp.broadcast_to((positions_T // block_size)[:, None, None], (n_batch, n_queries, n_kv, 1))
    block_BTGn1 = jnp.concatenate([sel_BTGn, own_BTG1], axis=-1)[..., None]
    at_BTGM = (block_BTGn1 * block_size + jnp.arange(block_size)).reshape(n_batch, n_queries, n_kv, -1)
    is_read_BTGM = (at_BTGM >= 0) & (at_BTGM <= positions_T[:, None, None])
    index_BMG1 = jnp.moveaxis(at_BTGM, 2, 3).reshape(n_batch, -1, n_kv, 1)
    k_BTMGK, v_BTMGK = (
        jnp.take_along_axis(x, index_BMG1, axis=1, mode="clip").reshape(n_batch, n_queries, -1, n_kv, x.shape[-1])
        for x in (k_BSGK, v_BSGK)
    )
    q_BTGRK = q_BTHK.reshape(n_batch, n_queries, n_kv, -1, q_BTHK.shape[-1])
    s_BTGRM = jnp.einsum("btgrk,btmgk->btgrm", q_BTGRK, k_BTMGK, preferred_element_type=jnp.float32)
    s_BTGRM = jnp.where(is_read_BTGM[:, :, :, None], q_BTHK.shape[-1] ** -0.5 * s_BTGRM, -jnp.inf)
    p_BTGRM = jax.nn.softmax(s_BTGRM, axis=-1).astype(v_BSGK.dtype)
    return jnp.einsum("btgrm,btmgk->btgrk", p_BTGRM, v_BTMGK).reshape(q_BTHK.shape)


@save_inputs
def _gated_sum(gate_BTHJ: Array, *branches_BTHK: Array) -> Array:
    gate_BTHJ = jax.nn.sigmoid(gate_BTHJ)
    y_BTHK = sum(gate_BTHJ[..., j, None] * o_BTHK for j, o_BTHK in enumerate(branches_BTHK))
    return jnp.asarray(y_BTHK, branches_BTHK[0].dtype)


class NSA(AttentionMixer):
    """Attention to block means, selected blocks and a window, each with a gate."""

    gate: Linear  # one gate per head and branch

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; the query heads of a key head share a block selection
        head_dim: int | None = None,  # None = model width / heads
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10_000.0,
        rope_share: float = 1.0,  # of each head's channels, the first, are rotated (partial RoPE)
        # RMSNorm with a learned gain over each head's q and k, before RoPE; "full" = over the q and k of all heads
        qk_norm: bool | Literal["full"] = False,
        conv: bool = False,  # adds a convolution over 4 tokens to each of q, k and v, before QK norm and RoPE
        block_size: int = 64,  # keys per block
        blocks: int = 16,  # blocks per query, including the first, the query's and the one before it
        window: int = 512,  # keys of the window branch, including the query's
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        base.at_least(1, window=window)
        if not 1 <= block_size <= layer.max_len:
            raise UserError(
                f"block_size={block_size} does not fit {base.size(max_len=layer.max_len)}: choose blocks of 1 "
                f"to {layer.max_len} tokens (the paper: 64), or longer sequences."
            )
        if blocks < 3:
            raise UserError(
                f"blocks={blocks} is too small: the first block, the query's and the one before it are always read. "
                "Choose at least 3; 3 selects no further block (the paper: 16)."
            )
        # Not called `window`: in the base class, `window` limits the cache of all branches.
        self.block_size, self.blocks, self.window_size = block_size, blocks, window
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position=position,
            rope_base=rope_base,
            rope_share=rope_share,
            qk_norm=qk_norm,
            bias=False,
            conv=conv,
            layer=layer,
            rngs=rngs,
        )
        # As in fla's models, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = Linear(heads * self.head_dim, dim, axes=("heads", "embed"), rngs=rngs)
        self.gate = Linear(dim, 3 * heads, axes=("embed", "heads"), rngs=rngs)

    def mix(self, attend: Attend, x_BTD: Array, positions_T: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the mixer to tokens at consecutive positions.

        `attend` is `attend_sequence` (no cache) or `attend_next`; both return the three branches, [B, T, H, 3 K].
        """
        o_BTHX, cache = self.convolve_and_attend(attend, *self.project(x_BTD, positions_T), cache)
        branches_BTHK = jnp.split(o_BTHX, 3, axis=-1)  # XLA removes the concatenation
        gate_BTHJ = project_float32(self.gate, x_BTD).reshape(*o_BTHX.shape[:3], 3)
        y_BTHK = _gated_sum(gate_BTHJ, *branches_BTHK)
        return self.out(y_BTHK.reshape(*x_BTD.shape[:2], -1)), cache

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array) -> Array:
        """Return the three branches, compressed, selected and window: [B, T, H, 3 K]."""
        compressed_BTHK, sel_BTGn = self.compress(q_BTHK, *self.means(k_BTGK, v_BTGK))
        selected_BTHK = kernels_pallas.selected_chunk_attention(
            q_BTHK, k_BTGK, v_BTGK, save_choice(sel_BTGn), chunk_size=self.block_size
        )
        window_BTHK = causal_attention(q_BTHK, k_BTGK, v_BTGK, window=self.window_size)
        return jnp.concatenate([compressed_BTHK, selected_BTHK, window_BTHK], axis=-1)

    def means(self, k_BSGK: Array, v_BSGK: Array) -> tuple[Array, Array]:
        """Return the mean keys and values of complete blocks, float32 [B, c, G, K]."""
        k_mean_BcGK, v_mean_BcGK = (kernels_pallas.chunk_means(x, chunk_size=self.block_size) for x in (k_BSGK, v_BSGK))
        return k_mean_BcGK, v_mean_BcGK

    def compress(
        self, q_BTHK: Array, k_mean_BcGK: Array, v_mean_BcGK: Array, positions_T: Array | None = None
    ) -> tuple[Array, Array]:
        """Return `kernels_pallas.compressed_attention`: [B, T, H, K], and the selection, [B, T, G, n]."""
        options: Any = {"block_size": self.block_size, "top_k": self.blocks - 1}
        return kernels_pallas.compressed_attention(q_BTHK, k_mean_BcGK, v_mean_BcGK, positions_T, **options)

    def init_attention_cache(self, batch: int, max_len: int, dtype: Any) -> NSACache:
        """Return an empty cache of `max_len` entries."""
        cache = super().init_attention_cache(batch, max_len, dtype)
        means = jax.tree.map(jnp.zeros_like, jax.eval_shape(self.means, cache.k_BSGK, cache.v_BSGK))
        return NSACache(**cache._asdict(), k_mean_BcGK=means[0], v_mean_BcGK=means[1])

    def extend(self, cache: NSACache, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> NSACache:
        """Return the cache with T more keys and values, and means of completed blocks."""
        cache = super().extend(cache, k_BTGK, v_BTGK, *gates)
        if k_BTGK.shape[1] > 1:
            k_mean_BcGK, v_mean_BcGK = self.means(cache.k_BSGK, cache.v_BSGK)
        else:
            update = functools.partial(kernels_pallas.update_chunk_means, chunk_size=self.block_size)
            k_mean_BcGK = update(cache.k_mean_BcGK, cache.k_BSGK, cache.length)
            v_mean_BcGK = update(cache.v_mean_BcGK, cache.v_BSGK, cache.length)
        return cache._replace(k_mean_BcGK=k_mean_BcGK, v_mean_BcGK=v_mean_BcGK)

    def attend_after(
        self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: NSACache, *gates: Array
    ) -> tuple[Array, NSACache]:
        """Attend from T new tokens to the cache and to each other, causally.

        Returns [B, T, H, 3 K] and the extended cache.
        """
        cache = self.extend(cache, k_BTGK, v_BTGK, *gates)
        return self._attend_last(q_BTHK, cache), cache

    def attend_step(self, q_BHK: Array, cache: NSACache) -> Array:
        """Attend from one query to the cache; return [B, H, 3 K]."""
        return self._attend_last(q_BHK[:, None], cache)[:, 0]

    def _attend_last(self, q_BTHK: Array, cache: NSACache) -> Array:
        """Attend from the last T tokens of the cache to the cache."""

        def attend_group(q_BtHK: Array, positions_t: Array) -> Array:
            compressed_BtHK, sel_BtGn = self.compress(q_BtHK, cache.k_mean_BcGK, cache.v_mean_BcGK, positions_t)
            selected_BtHK = selected_attention_at(
                q_BtHK, cache.k_BSGK, cache.v_BSGK, positions_t, sel_BtGn, block_size=self.block_size
            )
            width = min(cache.k_BSGK.shape[1], self.window_size + q_BtHK.shape[1] - 1)
            start = jnp.maximum(positions_t[-1] + 1 - width, 0)
            k_BWGK, v_BWGK = (lax.dynamic_slice_in_dim(x, start, width, axis=1) for x in (cache.k_BSGK, cache.v_BSGK))
            window_BtHK = attention_at(
                q_BtHK, k_BWGK, v_BWGK, positions_t, start + jnp.arange(width), window=self.window_size
            )
            return jnp.concatenate([compressed_BtHK, selected_BtHK, window_BtHK], axis=-1)

        n_queries = q_BTHK.shape[1]
        return in_groups(attend_group, q_BTHK, cache.length - n_queries + jnp.arange(n_queries))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of QK^T and PV per token, summed over the branches."""
        i_T, size = np.arange(seq_len), self.block_size
        means_T = (i_T + 1) // size
        selected_T = i_T % size + 1 + size * np.minimum(i_T // size, self.blocks - 1)
        pairs = (means_T + selected_T + np.minimum(i_T + 1, self.window_size)).mean()
        return 4 * self.heads * self.head_dim * float(pairs)
