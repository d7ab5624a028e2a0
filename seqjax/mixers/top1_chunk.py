"""Top-1 Chunk: attention to the local chunk and to selected past chunks.

With chunks of C tokens, query i reads its own chunk up to position i and the past chunk c*, in one softmax (arXiv
2505.18522, section 5):

    exact       c* = argmax_c sum_{j in c} exp(s_ij)      the largest probability mass
    approx      c* = argmax_c q_i . mean_{j in c} k_j     a first-order approximation of exact
    best_key    c* = argmax_c max_{j in c} s_ij           the chunk with full attention's largest weight
    shortlist   best_key among the m chunks that lead a cheap table (kernels_pallas/select_chunk/tables.py)
    random      c* = hash(position, head), a control; the same in every layer

Best key is not in the paper. No gradient flows through the selection.

`top_k` selects the k chunks with the largest scores, or all past chunks of a query that has fewer. MoBA (arXiv
2502.13189) also selects by the mean key, on queries and keys without `qk_norm`. Its top-k counts the query's chunk, so
it is selection=approx with `top_k` one less (configs/moba.py).
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import kernels_pallas
from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._attention import AttentionMixer
from seqjax.ops.attention import in_groups
from seqjax.types import Array, Layer


class Top1Cache(NamedTuple):
    """A `KVCache` with float32 table rows of each complete chunk.

    The rows are the mean key for approx, the table's rows for shortlist, and None for other selections.
    """

    k_BSGK: Array
    v_BSGK: Array
    length: Array
    table_BcGPK: Array | None


class Top1Chunk(AttentionMixer):
    """Attention to the local chunk and to one (or `top_k`) selected past chunks."""

    resets = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; fewer = grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        # With "none", only the causal mask and config.model.learned_positions carry position information.
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10_000.0,
        rope_share: float = 1.0,  # of each head's channels, the first, are rotated (partial RoPE)
        # RMSNorm with a learned gain over each head's q and k, before RoPE; "full" = over the q and k of all heads
        qk_norm: bool | Literal["full"] = True,
        bias: bool = False,
        conv: bool = False,  # adds a convolution over 4 tokens to each of q, k and v, before QK norm and RoPE
        gate: bool = False,  # multiplies the heads' output by sigmoid(x W), a gate per channel
        chunk_size: int = 128,
        # exact and best_key score every past key, best_key_int8 in 8 bits; approx scores one mean key per chunk;
        # shortlist scores the keys of the chunks that lead a table; random, a control, scores nothing
        selection: Literal["exact", "best_key", "best_key_int8", "approx", "shortlist", "random"] = "exact",
        # past chunks per query; the kernels support up to 16
        top_k: int = 1,
        shortlist: int = 4,  # for selection=shortlist: the number of chunks whose keys are scored
        # for selection=shortlist: a chunk's mean key, the mean keys of its 8 equal runs, or its mean key and the
        # leading eigenvector of its keys' covariance
        table: Literal["mean", "sub_means", "mean_eigen"] = "mean",
        implementation: str | None = None,
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        if not 1 <= chunk_size <= layer.max_len:
            raise UserError(
                f"chunk_size={chunk_size} does not fit {base.size(max_len=layer.max_len)}: choose a chunk "
                f"of 1 to {layer.max_len} tokens (the paper: 128), or longer sequences."
            )
        if top_k < 1:
            raise UserError(
                f"top_k={top_k} selects no past chunk: choose 1 (the paper) or more. For attention to near tokens "
                "only, use transformer_pp with a window."
            )
        if selection == "shortlist" and shortlist < top_k:
            raise UserError(
                f"shortlist={shortlist} holds fewer than top_k={top_k} chunks: set shortlist to {top_k} or more."
            )
        if selection == "shortlist" and table == "sub_means" and chunk_size % 8:
            raise UserError(
                f"table=sub_means cuts a chunk into 8 equal runs: chunk_size={chunk_size} must be a multiple of 8, or "
                "choose table=mean."
            )
        self.chunk_size, self.selection, self.top_k, self.implementation = chunk_size, selection, top_k, implementation
        self.shortlist, self.table = shortlist, "mean" if selection == "approx" else table
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position=position,
            rope_base=rope_base,
            rope_share=rope_share,
            qk_norm=qk_norm,
            bias=bias,
            conv=conv,
            gate=gate,
            layer=layer,
            rngs=rngs,
        )

    def check_length(self, seq_len: int) -> None:
        """Raise `UserError` if `top_k` exceeds the last query's number of past chunks, or 1.

        From that number on, every query reads all of its past chunks, and nothing is selected.
        """
        past = max(1, (seq_len - 1) // self.chunk_size)  # complete chunks before the last query's chunk
        if self.top_k > past:
            raise UserError(
                f"top_k={self.top_k} is more than the {past} past chunks of chunk_size={self.chunk_size} in "
                f"{base.size(max_len=seq_len)}: choose at most {past}, or smaller chunks. To read all chunks, use full "
                "attention, transformer_pp."
            )

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, segments: Array | None = None) -> Array:
        """Return `kernels_pallas.top1_chunk_attention` of the inputs, [B, T, H, K]."""
        return kernels_pallas.top1_chunk_attention(
            q_BTHK,
            k_BTGK,
            v_BTGK,
            chunk_size=self.chunk_size,
            selection=self.selection,
            top_k=self.top_k,
            shortlist=self.shortlist,
            table=self.table,
            segments=segments,
            implementation=self.implementation,
        )

    def init_attention_cache(self, batch: int, max_len: int, dtype: Any) -> Top1Cache:
        """Return an empty cache of `max_len` entries."""
        cache = super().init_attention_cache(batch, max_len, dtype)
        table_BcGPK = None
        if self.selection in ("approx", "shortlist"):
            make = functools.partial(kernels_pallas.chunk_table, chunk_size=self.chunk_size, table=self.table)
            table_BcGPK = jnp.zeros_like(jax.eval_shape(make, cache.k_BSGK))
        return Top1Cache(cache.k_BSGK, cache.v_BSGK, cache.length, table_BcGPK)

    def extend(self, cache: Top1Cache, k_BTGK: Array, v_BTGK: Array) -> Top1Cache:
        """Return the cache with T more keys and values, and completed chunks' table rows."""
        cache = super().extend(cache, k_BTGK, v_BTGK)
        if cache.table_BcGPK is None:
            return cache
        options: Any = {"chunk_size": self.chunk_size, "table": self.table}
        if k_BTGK.shape[1] > 1:
            table_BcGPK = kernels_pallas.chunk_table(cache.k_BSGK, **options)
        else:
            table_BcGPK = kernels_pallas.update_chunk_table(cache.table_BcGPK, cache.k_BSGK, cache.length, **options)
        return cache._replace(table_BcGPK=table_BcGPK)

    def attend_after(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: Top1Cache) -> tuple[Array, Top1Cache]:
        """Attend from T new tokens to the cache and to each other, causally.

        Returns [B, T, H, K] and the extended cache.
        """
        lengths_T = cache.length + 1 + jnp.arange(v_BTGK.shape[1])
        cache = self.extend(cache, k_BTGK, v_BTGK)
        # Under vmap, XLA scores a group of queries in one product; a kernel would read the cache once per query.
        attend = jax.vmap(functools.partial(self._decode, implementation="xla"), in_axes=(1, None, 0), out_axes=1)
        return in_groups(lambda q_BtHK, lengths_t: attend(q_BtHK, cache, lengths_t), q_BTHK, lengths_T), cache

    def attend_step(self, q_BHK: Array, cache: Top1Cache) -> Array:
        """Attend from one query to the cache; return [B, H, K]."""
        return self._decode(q_BHK, cache, cache.length)

    def _decode(self, q_BHK: Array, cache: Top1Cache, length: Array, *, implementation: str | None = None) -> Array:
        rows: dict[str, Any] = {"chunk_table_BcGPK": cache.table_BcGPK}
        if cache.table_BcGPK is not None and self.selection == "approx":
            rows = {"chunk_mean_BcGK": cache.table_BcGPK[..., 0, :]}
        return kernels_pallas.top1_chunk_decode(
            q_BHK,
            cache.k_BSGK,
            cache.v_BSGK,
            length,
            chunk_size=self.chunk_size,
            selection=self.selection,
            top_k=self.top_k,
            shortlist=self.shortlist,
            table=self.table,
            **rows,
            implementation=implementation,
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of selection and attention per token."""
        return self._selection_flops(seq_len) + self._attention_flops(seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """Return the training FLOPs per token; the selection has no backward."""
        return self._selection_flops(seq_len) + 3 * self._attention_flops(seq_len)

    def _selection_flops(self, seq_len: int) -> float:
        """Return the FLOPs of products with queries; making a table costs little more."""
        if self.selection == "random":
            return 0.0
        n_chunks, key = seq_len // self.chunk_size, 2 * self.heads * self.head_dim / seq_len
        every = self._past(seq_len, n_chunks)
        if self.selection == "approx":
            return key * every
        if self.selection != "shortlist" or self.shortlist >= (seq_len - 1) // self.chunk_size:
            return key * self.chunk_size * every
        n_rows = {"mean": 1, "sub_means": 8, "mean_eigen": 2}[self.table]
        return key * (n_rows * every + self.chunk_size * self._past(seq_len, self.shortlist))

    def _attention_flops(self, seq_len: int) -> float:
        chunk = self.chunk_size
        n_chunks, remainder = divmod(seq_len, chunk)
        local = (n_chunks * chunk * (chunk + 1) + remainder * (remainder + 1)) / 2
        remote = chunk * self._past(seq_len, self.top_k)
        return 4 * self.heads * self.head_dim * (local + remote) / seq_len

    def _past(self, seq_len: int, most: int) -> int:
        """Return the number of past chunks, at most `most` each, summed over queries."""
        n_chunks = seq_len // self.chunk_size
        # Queries from chunk n on have an n-th past chunk.
        return sum(seq_len - n * self.chunk_size for n in range(1, min(most, n_chunks) + 1))
