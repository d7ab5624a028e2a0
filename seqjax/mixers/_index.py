"""The shared code of MSA and DSA: softmax attention to keys that an index chooses.

The index reads the mixer's input without passing a gradient to it. Its queries and keys are normed and partly rotated;
its parameters belong to the group `auxiliary`, and only `seqjax.ops.index.index_loss` trains them. The attention learns
from the language loss over the chosen keys, and the choice has no gradient.

Suffix letters in addition to the usual ones: I, index heads; N, index width; t, queries in a group.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._attention import Attend, AttentionMixer
from seqjax.nn import save_choice
from seqjax.ops.positions import rope, rope_angles
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array

# Index queries [B, T, I, N], keys [B, T, 1, N] and, in DSA, head weights [B, T, I].
Index = tuple[Array, ...]


class IndexCache(NamedTuple):
    """A `KVCache` with the index keys, normed and rotated."""

    k_BSGK: Array
    v_BSGK: Array
    length: Array
    index_k_BSN: Array


def check_rotation(index_rope: int, index_dim: int) -> None:
    """Raise `UserError` unless the first `index_rope` of `index_dim` channels can be rotated in pairs."""
    base.at_least(1, index_dim=index_dim)
    if not 0 <= index_rope <= index_dim or index_rope % 2:
        raise UserError(
            f"index_rope={index_rope} must be even, and at most index_dim={index_dim}: RoPE rotates pairs of the "
            "index's channels. Set 0 for an index without positions."
        )


class IndexedAttention(AttentionMixer):
    """Softmax attention to keys that an index chooses."""

    index: nnx.Module  # maps the input to `Index`
    index_dim: int
    index_rope: int  # rotated channels

    @abc.abstractmethod
    def project_index(self, x_BTD: Array) -> Index:
        """Return the index's normed queries, keys and weights before rotation."""

    @abc.abstractmethod
    def choose(self, index: Index) -> Array:
        """Return the choice of a whole sequence, integers [B, T, ...]."""

    @abc.abstractmethod
    def attend_chosen(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, choice: Array) -> Array:
        """Attend to the chosen keys of a whole sequence; return [B, T, H, K]."""

    @abc.abstractmethod
    def divergence(self, index: Index, q_BTHK: Array, k_BTGK: Array, choice: Array) -> Array:
        """Return `seqjax.ops.index.index_loss`, [].

        Only `index` receives a gradient.
        """

    @abc.abstractmethod
    def attend_last(self, q_BTHK: Array, index: Index, cache: IndexCache) -> Array:
        """Attend from the cache's last T tokens to the keys that they choose; return [B, T, H, K]."""

    def share_index(self, index: Index) -> Index:
        """Return the rotated index as the devices of `seq` need it: by default the whole sequence."""
        return tuple(gather_time(x) for x in index)

    def mix(self, attend: Attend, x_BTD: Array, positions_T: Array, cache: Any) -> tuple[Array, Any]:
        """Apply the mixer to tokens at consecutive positions.

        `attend` is `attend_sequence`, `attend_next` or `attend_with_loss`.
        """
        index = self.project_index(jax.lax.stop_gradient(x_BTD))
        o_BTHK, cache = self.convolve_and_attend(attend, *self.project(x_BTD, positions_T), cache, *index)
        return self.output(x_BTD, o_BTHK), cache

    def call_with_loss(self, x_BTD: Array) -> tuple[Array, Array]:
        """Apply the parallel form; return the output and the loss of the index."""
        return self.mix(self.attend_with_loss, x_BTD, jnp.arange(x_BTD.shape[1]), None)

    def attend_with_loss(self, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: None, *index: Array) -> Any:
        """Attend over a whole sequence of projections; return [B, T, H, K] and the loss."""
        q_BTHK, k_BTGK, v_BTGK, rotated = self._operands(q_BTE, k_BTE, v_BTE, index)
        choice = save_choice(self.choose(rotated))
        o_BTHK = self.attend_chosen(q_BTHK, k_BTGK, v_BTGK, choice)
        loss = self.divergence(rotated, q_BTHK, k_BTGK, choice)
        return heads_to_time(o_BTHK), loss.astype(jnp.float32)

    def attend_sequence(self, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: Any, *gates: Array) -> tuple[Array, Any]:
        """Attend over a whole sequence of projections.

        Returns [B, T, H, K] and the filled cache (None for None). `gates` is the index.
        """
        q_BTHK, k_BTGK, v_BTGK, index = self._operands(q_BTE, k_BTE, v_BTE, gates)
        o_BTHK = self.attend_chosen(q_BTHK, k_BTGK, v_BTGK, save_choice(self.choose(index)))
        return heads_to_time(o_BTHK), None if cache is None else self.extend(cache, k_BTGK, v_BTGK, index[1])

    def _operands(self, q_BTE: Array, k_BTE: Array, v_BTE: Array, index: Index) -> tuple[Array, Array, Array, Index]:
        """Return q, k, v and the index of a whole sequence, rotated, as a core needs them."""
        length = q_BTE.shape[1]
        positions_T = jnp.arange(length)
        q_BTHK, k_BTGK, v_BTGK = self.split_heads(q_BTE, k_BTE, v_BTE, positions_T, length)
        shared = self.share_index(self._rotated(index, positions_T, length))
        return time_to_heads(q_BTHK), time_to_heads(k_BTGK), time_to_heads(v_BTGK), shared

    def _rotated(self, index: Index, positions_T: Array, max_len: int) -> Index:
        if not self.index_rope:
            return index
        angles = rope_angles(positions_T, head_dim=self.index_rope, base=self.rope_base, max_len=max_len)
        return *(rope(x, *angles) for x in index[:2]), *index[2:]

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> Array:
        """Attend over a whole sequence; `gates` is the rotated index."""
        return self.attend_chosen(q_BTHK, k_BTGK, v_BTGK, self.choose(gates))

    def attend_next(self, q_BTE: Array, k_BTE: Array, v_BTE: Array, cache: Any, *gates: Array) -> tuple[Array, Any]:
        """Attend from T tokens that continue the cached sequence.

        Returns [B, T, H, K] and the extended cache. `gates` is the index.
        """
        positions_T, max_len = cache.length + jnp.arange(v_BTE.shape[1]), cache.k_BSGK.shape[1]
        q_BTHK, k_BTGK, v_BTGK = self.split_heads(q_BTE, k_BTE, v_BTE, positions_T, max_len)
        index = self._rotated(gates, positions_T, max_len)
        cache = self.extend(cache, k_BTGK, v_BTGK, index[1])
        return self.attend_last(q_BTHK, index, cache), cache

    def attend_step(self, q_BHK: Array, cache: Any) -> Array:
        """Raise an error: the step of an indexed attention is `attend_last`."""
        raise NotImplementedError

    def init_attention_cache(self, batch: int, max_len: int, dtype: Any) -> IndexCache:
        """Return an empty cache of `max_len` entries."""
        cache = super().init_attention_cache(batch, max_len, dtype)
        return IndexCache(**cache._asdict(), index_k_BSN=jnp.zeros((batch, max_len, self.index_dim), dtype))

    def extend(self, cache: IndexCache, k_BTGK: Array, v_BTGK: Array, *gates: Array) -> IndexCache:
        """Return the cache with T more keys, values and rotated index keys [B, T, 1, N]."""
        (index_k_BT1N,) = gates
        index_k_BSN = self.store(cache.index_k_BSN, index_k_BT1N[:, :, 0], cache.length)
        return super().extend(cache, k_BTGK, v_BTGK)._replace(index_k_BSN=index_k_BSN)


def pairs_per_token(keys: int, seq_len: int) -> float:
    """Return the mean number of keys per query, if a query reads at most `keys` keys."""
    width = min(keys, seq_len)
    return width - width * (width - 1) / (2 * seq_len)
