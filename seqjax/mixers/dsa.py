"""DSA, DeepSeek Sparse Attention: a small index chooses single keys.

With I index heads of N channels:

    q_i, k = rope(x W_q), rope(LN(x W_k))              index queries, one index key; LayerNorm with gain and bias
    w = x W_w / sqrt(I)                                a weight per index head, of either sign
    I_ts = sum_i w_ti relu(q_ti . k_s / sqrt(N))
    S_t = the n keys s <= t with the largest I_ts, the same for all heads; ties go to the earlier key
    o_t = sum_{s in S_t} softmax_s(q_t . k_s / sqrt(K)) v_s
    L = mean_t KL(p_t || softmax_{S_t} I_t), p_t the mean of the heads' weights

Only L trains the index, and L trains nothing else; the index reads x without a gradient. The first `index_rope`
channels are rotated by halves (DeepSeek-V3.2, arXiv 2512.02556, section 2.1; public implementations: transformers,
`models/deepseek_v32`; for L, NVIDIA's Megatron-LM, `experimental_attention_variant/dsa.py`).

Deviations: the index queries come from x instead of a normed query latent, and the attention is Transformer++'s instead
of MLA. The Hadamard rotation, which does not change products, and FP8 are left out. The query's own key is not always
chosen, as in the public code.

This is the sparse stage of the published training. For the dense stage, train a Transformer++ and continue with
`--init_from`: the index then starts from new values (docs/mixers.md).

At width 768 and 12 layers: I = 8, N = 32, n = 256; 112.3M parameters, tied. The attention computes all scores of 256
queries at a time and masks them, so it saves no time at training lengths.

Suffix letters in addition to the usual ones: I, index heads; N, index width; n, chosen keys; w, integers of 32 bits.
"""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._index import Index, IndexCache, IndexedAttention, check_rotation, pairs_per_token
from seqjax.nn.layers import LayerNorm, Linear, project_float32
from seqjax.nn.params import auxiliary
from seqjax.ops.index import choose_keys, chosen_attention, index_loss, relu_scores, unpack
from seqjax.types import Array, Layer


class KeyIndex(nnx.Module):
    """The projections of the index: several query heads with weights, and one key."""

    def __init__(self, dim: int, heads: int, width: int, *, rngs: nnx.Rngs):
        self.q = Linear(dim, heads * width, axes=("embed", None), rngs=rngs)
        self.k = Linear(dim, width, axes=("embed", None), rngs=rngs)
        self.k_norm = LayerNorm(width, eps=1e-6, axis=None, rngs=rngs)
        self.w = Linear(dim, heads, axes=("embed", None), rngs=rngs)

    def __call__(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        """Return the queries [B, T, I, N], keys [B, T, 1, N] and weights, float32 [B, T, I]."""
        w_BTI = project_float32(self.w, x_BTD)
        w_BTI *= w_BTI.shape[-1] ** -0.5
        q_BTIN, k_BT1N = (y.reshape(*y.shape[:2], -1, self.k.w.shape[1]) for y in (self.q(x_BTD), self.k(x_BTD)))
        return q_BTIN, self.k_norm(k_BT1N), w_BTI


class DSA(IndexedAttention):
    """Attention to the keys that an index chooses."""

    extends: ClassVar[str | None] = "transformer_pp"
    index: KeyIndex

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; fewer = grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10_000.0,  # also of the index
        rope_share: float = 1.0,  # of each head's channels, the first, are rotated (partial RoPE)
        # RMSNorm with a learned gain over each head's q and k, before RoPE; "full" = over the q and k of all heads
        qk_norm: bool | Literal["full"] = False,
        conv: bool = False,  # adds a convolution over 4 tokens to each of q, k and v, before QK norm and RoPE
        gate: bool = False,  # multiplies the heads' output by sigmoid(x W), a gate per channel
        top_k: int = 2048,  # keys per query
        index_heads: int = 8,
        index_dim: int = 32,  # channels of an index head
        index_rope: int = 16,  # channels of an index head that RoPE rotates
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        base.at_least(1, top_k=top_k, index_heads=index_heads)
        check_rotation(index_rope, index_dim)
        self.top_k, self.index_heads, self.index_dim, self.index_rope = top_k, index_heads, index_dim, index_rope
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
            gate=gate,
            layer=layer,
            rngs=rngs,
        )
        self.index = auxiliary(KeyIndex(dim, index_heads, index_dim, rngs=rngs))

    def check_length(self, seq_len: int) -> None:
        """Raise `UserError` if a sequence has fewer than `top_k` keys."""
        if self.top_k > seq_len:
            raise UserError(
                f"top_k={self.top_k} is more than the {seq_len} keys of {base.size(max_len=seq_len)}: choose at most "
                f"{seq_len}. To read all keys, use full attention, transformer_pp."
            )

    def project_index(self, x_BTD: Array) -> Index:
        """Return the index queries [B, T, I, N], keys [B, T, 1, N] and weights [B, T, I]."""
        return self.index(x_BTD)

    def choose(self, index: Index) -> Array:
        """Return the bits of the chosen keys, uint32 [B, T, w]."""
        q_BTIN, k_BT1N, w_BTI = index
        positions_T = jnp.arange(q_BTIN.shape[1])
        return choose_keys(relu_scores, (q_BTIN, w_BTI), k_BT1N[:, :, 0], positions_T, self.top_k)

    def attend_chosen(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, choice: Array) -> Array:
        """Return `seqjax.ops.index.chosen_attention`."""
        return chosen_attention(q_BTHK, k_BTGK, v_BTGK, choice)

    def divergence(self, index: Index, q_BTHK: Array, k_BTGK: Array, choice: Array) -> Array:
        """Return the loss of the index, [], a mean over tokens."""
        q_BTIN, k_BT1N, w_BTI = index

        def is_chosen(bits_Btw: Array, position_1t: Array, n_keys: int) -> Array:
            del position_1t
            return unpack(bits_Btw, n_keys)[:, :, None]

        return index_loss(relu_scores, is_chosen, (q_BTIN, w_BTI), k_BT1N[:, :, 0], q_BTHK, k_BTGK, choice)

    def attend_last(self, q_BTHK: Array, index: Index, cache: IndexCache) -> Array:
        """Attend from the cache's last T tokens to the keys that they choose."""
        n_queries = q_BTHK.shape[1]
        positions_T = cache.length - n_queries + jnp.arange(n_queries)
        index_k_BSN = cache.index_k_BSN.astype(index[0].dtype)
        if n_queries > 1:
            bits_BTw = choose_keys(relu_scores, (index[0], index[2]), index_k_BSN, positions_T, self.top_k)
            return chosen_attention(q_BTHK, cache.k_BSGK, cache.v_BSGK, bits_BTw)
        score_BS = relu_scores((index[0], index[2]), index_k_BSN)[:, 0, 0]
        score_BS = jnp.where(jnp.arange(score_BS.shape[1]) < cache.length, score_BS, -jnp.inf)
        best_Bn, at_Bn = lax.top_k(score_BS, min(self.top_k, score_BS.shape[1]))
        k_BnGK, v_BnGK = (jnp.take_along_axis(x, at_Bn[..., None, None], axis=1) for x in (cache.k_BSGK, cache.v_BSGK))
        q_BGRK = q_BTHK.reshape(len(q_BTHK), self.kv_heads, -1, self.head_dim)
        s_BGRn = jnp.einsum("bgrk,bngk->bgrn", q_BGRK, k_BnGK, preferred_element_type=jnp.float32)
        s_BGRn = jnp.where((best_Bn > -jnp.inf)[:, None, None], self.head_dim**-0.5 * s_BGRn, -jnp.inf)
        p_BGRn = jax.nn.softmax(s_BGRn, axis=-1).astype(v_BnGK.dtype)
        return jnp.einsum("bgrn,bngk->bgrk", p_BGRn, v_BnGK).reshape(q_BTHK.shape)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of the index scores and of the attention to the chosen keys, per token."""
        index = 2 * self.index_heads * self.index_dim * (seq_len + 1) / 2
        return index + 4 * self.heads * self.head_dim * pairs_per_token(self.top_k, seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """Return the training FLOPs per token.

        The backward pass of the index covers the chosen keys.
        """
        pairs = pairs_per_token(self.top_k, seq_len)
        backward = 2 * 2 * self.index_heads * self.index_dim * pairs + 2 * 4 * self.heads * self.head_dim * pairs
        return self.flops_per_token(seq_len) + backward
