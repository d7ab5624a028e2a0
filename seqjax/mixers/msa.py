"""MSA, MiniMax Sparse Attention: a small index chooses blocks of keys.

With blocks of b keys and an index head g for each key head:

    q_g, k = rope(norm(x W_q)), rope(norm(x W_k))      an index query per key head, one index key; RMSNorm
    blocks_t = the local block, and the n - 1 earlier blocks c with the largest max_{s in c} q_g . k_s
    o_t = causal softmax attention to the keys of these blocks, per head of the group
    L = mean over tokens and key heads of KL(p || softmax(q_g . k / sqrt(N))) over these keys

p is the attention weight, averaged over the group's heads. Only L trains the index, and L trains nothing else; the
index reads x without a gradient. The choice is `kernels_pallas.select_chunk` by best key, with ties to the lowest
block, the attention is `kernels_pallas.selected_chunk_attention`, and L is `kernels_pallas.index_loss`. Source: Lai et
al., MiniMax, arXiv 2606.13392; the public implementation, transformers' `models/minimax_m3_vl`, has no loss.

Deviations: the gains of the norms start at 1 instead of 1 + w with w = 0. The attention rotates all channels by
default, MiniMax-M3's half of them (`rope_share`). L is a mean over key heads; the public code does not show its scale,
and Adam's updates do not depend on it.

The defaults b = 128, n = 16 are MiniMax-M3's; configs/msa.py has smaller values for shorter sequences. At width 768 and
12 layers: 12 heads of 64, 3 key heads, SwiGLU of 2432; 111.9M parameters, tied.

Suffix letters in addition to the usual ones: N, index width; c, blocks; n, chosen earlier blocks; t, queries of a
group.
"""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

import kernels_pallas
from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._index import Index, IndexCache, IndexedAttention, check_rotation
from seqjax.mixers.nsa import selected_attention_at
from seqjax.nn.layers import Linear, RMSNorm
from seqjax.nn.params import auxiliary
from seqjax.ops.index import dot_scores, scan_groups
from seqjax.sharding import gather_time, time_to_heads
from seqjax.types import Array, Layer


class BlockIndex(nnx.Module):
    """The projections of the index: a query head per key head, and one key."""

    def __init__(self, dim: int, heads: int, width: int, eps: float, *, rngs: nnx.Rngs):
        self.q = Linear(dim, heads * width, axes=("embed", "heads"), rngs=rngs)
        self.k = Linear(dim, width, axes=("embed", None), rngs=rngs)
        self.q_norm, self.k_norm = (RMSNorm(width, eps=eps, axis=None, rngs=rngs) for _ in range(2))

    def __call__(self, x_BTD: Array) -> tuple[Array, Array]:
        """Return the normed queries [B, T, G, N] and keys [B, T, 1, N]."""
        q_BTGN, k_BT1N = (y.reshape(*y.shape[:2], -1, self.k.w.shape[1]) for y in (self.q(x_BTD), self.k(x_BTD)))
        return self.q_norm(q_BTGN), self.k_norm(k_BT1N)


class MSA(IndexedAttention):
    """Attention to the local block and to earlier blocks that an index chooses."""

    index: BlockIndex

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; the query heads of a key head share a choice
        head_dim: int | None = None,  # None = model width / heads
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10_000.0,  # also of the index
        rope_share: float = 1.0,  # of each head's channels, the first, are rotated (partial RoPE)
        qk_norm: bool = True,  # RMSNorm with a learned gain over each head's q and k, before RoPE
        norm_eps: float = 1e-6,  # of qk_norm and of the index's norms
        conv: bool = False,  # adds a convolution over 4 tokens to each of q, k and v, before QK norm and RoPE
        gate: bool = False,  # multiplies the heads' output by sigmoid(x W), a gate per channel
        block_size: int = 128,  # keys per block
        blocks: int = 16,  # blocks per query, including the local block
        index_dim: int | None = None,  # channels of the index; None = head_dim
        index_rope: int | None = None,  # channels of the index that RoPE rotates; None = half of them
        implementation: str | None = None,
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        if not 1 <= block_size <= layer.max_len:
            raise UserError(
                f"block_size={block_size} does not fit {base.size(max_len=layer.max_len)}: choose blocks of 1 "
                f"to {layer.max_len} tokens (MiniMax-M3: 128), or longer sequences."
            )
        if blocks < 2:
            raise UserError(
                f"blocks={blocks} chooses no block, because the local block is one of them: choose at least 2 "
                "(MiniMax-M3: 16). For attention to near tokens only, use transformer_pp with a window."
            )
        if not 0 < norm_eps < 1:
            raise UserError(f"norm_eps={norm_eps} must be between 0 and 1.")
        self.block_size, self.blocks, self.implementation = block_size, blocks, implementation
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position=position,
            rope_base=rope_base,
            rope_share=rope_share,
            qk_norm=qk_norm,
            qk_norm_eps=norm_eps,
            bias=False,
            conv=conv,
            gate=gate,
            layer=layer,
            rngs=rngs,
        )
        # As in the public code, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = Linear(heads * self.head_dim, dim, axes=("heads", "embed"), rngs=rngs)
        self.index_dim = self.head_dim if index_dim is None else index_dim
        self.index_rope = self.index_dim // 4 * 2 if index_rope is None else index_rope
        check_rotation(self.index_rope, self.index_dim)
        self.index = auxiliary(BlockIndex(dim, self.kv_heads, self.index_dim, norm_eps, rngs=rngs))

    def check_length(self, seq_len: int) -> None:
        """Raise `UserError` if a sequence has fewer than `blocks` blocks.

        Every query would then read all of its past, and the index would choose nothing.
        """
        n_blocks = -(-seq_len // self.block_size)
        if self.blocks > n_blocks:
            raise UserError(
                f"blocks={self.blocks} is more than the {n_blocks} blocks of block_size={self.block_size} in "
                f"{base.size(max_len=seq_len)}: choose at most {n_blocks}, or smaller blocks. To read all keys, use "
                "full attention, transformer_pp."
            )

    def project_index(self, x_BTD: Array) -> Index:
        """Return the index queries [B, T, G, N] and keys [B, T, 1, N]."""
        return self.index(x_BTD)

    def share_index(self, index: Index) -> Index:
        """Split the index queries over devices like the key heads; the heads share the keys."""
        return time_to_heads(index[0]), gather_time(index[1])

    def choose(self, index: Index) -> Array:
        """Return the chosen earlier blocks, int32 [B, T, G, n], padded with -1."""
        options: Any = {"chunk_size": self.block_size, "selection": "best_key", "top_k": self.blocks - 1}
        sel = kernels_pallas.select_chunk(*index, **options, implementation=self.implementation)
        return sel.reshape(*index[0].shape[:3], -1)

    def attend_chosen(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, choice: Array) -> Array:
        """Return `kernels_pallas.selected_chunk_attention` over the local and the chosen blocks."""
        options: Any = {"chunk_size": self.block_size, "implementation": self.implementation}
        return kernels_pallas.selected_chunk_attention(q_BTHK, k_BTGK, v_BTGK, choice, **options)

    def divergence(self, index: Index, q_BTHK: Array, k_BTGK: Array, choice: Array) -> Array:
        """Return the loss of the index, [], a mean over tokens and key heads."""
        operands = index[0], index[1][:, :, 0], q_BTHK, k_BTGK, choice
        return kernels_pallas.index_loss(*operands, block_size=self.block_size, implementation=self.implementation)

    def attend_last(self, q_BTHK: Array, index: Index, cache: IndexCache) -> Array:
        """Attend from the cache's last T tokens to their local and their chosen blocks."""
        size, n_keys = self.block_size, cache.k_BSGK.shape[1]
        block_c = jnp.arange(-(-n_keys // size))

        def attend(_: None, group: tuple[Array, Array, Array], n_seen: int) -> tuple[None, Array]:
            del n_seen
            q_BtHK, index_q_BtGN, position_1t = group
            score_BtGS = dot_scores(index_q_BtGN, cache.index_k_BSN.astype(index_q_BtGN.dtype))
            padding = [(0, 0)] * 3 + [(0, -n_keys % size)]
            score_BtGc = jnp.pad(score_BtGS, padding).reshape(*score_BtGS.shape[:3], -1, size).max(-1)
            is_past_1tc = block_c < (position_1t // size)[..., None]
            score_BtGc = jnp.where(is_past_1tc[:, :, None], score_BtGc, -jnp.inf)
            sel = []
            for _rank in range(min(self.blocks - 1, len(block_c))):
                best_BtG = jnp.argmax(score_BtGc, axis=-1).astype(jnp.int32)
                sel.append(jnp.where(score_BtGc.max(-1) == -jnp.inf, -1, best_BtG))
                score_BtGc = jnp.where(block_c == best_BtG[..., None], -jnp.inf, score_BtGc)
            operands = q_BtHK, cache.k_BSGK, cache.v_BSGK, position_1t[0], jnp.stack(sel, axis=-1)
            return None, selected_attention_at(*operands, block_size=size)

        n_queries = q_BTHK.shape[1]
        position_1T = (cache.length - n_queries + jnp.arange(n_queries))[None]
        return scan_groups(attend, None, (q_BTHK, index[0], position_1T), n_keys)[1]

    def _keys_read(self, seq_len: int) -> tuple[float, float, float]:
        """Return the mean keys per query in complete earlier blocks, the local block and the chosen blocks."""
        own_T, in_own_T = np.divmod(np.arange(seq_len), self.block_size)
        chosen_T = self.block_size * np.minimum(own_T, self.blocks - 1)
        return float(self.block_size * own_T.mean()), float(in_own_T.mean() + 1), float(chosen_T.mean())

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of the choice and the attention per token."""
        past, own, chosen = self._keys_read(seq_len)
        return 2 * self.kv_heads * self.index_dim * past + 4 * self.heads * self.head_dim * (own + chosen)

    def train_flops_per_token(self, seq_len: int) -> float:
        """Return the training FLOPs per token.

        The choice has no backward pass. The loss also needs the index scores of the local block, and its backward pass
        covers the keys that the attention reads.
        """
        past, own, chosen = self._keys_read(seq_len)
        index = 2 * self.kv_heads * self.index_dim * (past + own + 2 * (own + chosen))
        return index + 3 * 4 * self.heads * self.head_dim * (own + chosen)
