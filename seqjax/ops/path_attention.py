"""PaTH attention: later tokens' matrices multiply each key before it is scored.

The equations are in `kernels_pallas/path_attention/api.py`. This module also updates cached keys for decoding.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

import kernels_pallas
from seqjax.types import Array

_float32 = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


class Chunk(NamedTuple):
    """The matrices that give every product within a chunk.

    These are W [..., C, K], T [..., C, C], and T lower(W K^T) [..., C, C].
    """

    w_CK: Array
    t_CC: Array
    twk_CC: Array


def path_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G V"],
    w_BTGK: Float[Array, "B T G K"],
    beta_BTG: Float[Array, "B T G"],
    log_f_BTH: Float[Array, "B T H"] | None = None,
    *,
    chunk_size: int = 128,
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """Return PaTH attention with scores scaled by 1 / sqrt(K), [B, T, H, V].

    w has unit length and beta is in (0, 2), both float32. G key-value heads, each with a separate path, serve H query
    heads. `implementation` selects the backend of `kernels_pallas.path_attention`; `chunk_size` affects only the speed.
    """
    options = {"chunk_size": chunk_size, "implementation": implementation}
    return kernels_pallas.path_attention(q_BTHK, k_BTGK, v_BTGK, w_BTGK, beta_BTG, log_f_BTH, **options)


def path_keys(
    old_BSGK: Float[Array, "B S G K"],
    k_BTGK: Float[Array, "B T G K"],
    w_BTGK: Float[Array, "B T G K"],
    beta_BTG: Float[Array, "B T G"],
    *,
    chunk_size: int = 128,
) -> tuple[Float[Array, "B S G K"], Float[Array, "B T G K"]]:
    """Return S cached and T new keys after the matrices of the T new tokens, float32.

    The last token's scores are then plain products of its query with these keys. Zero keys stay zero.
    """
    seq_len = k_BTGK.shape[1]
    chunks = functools.partial(_chunks, size=min(chunk_size, seq_len))
    k_cBGCK = chunks(k_BTGK)
    chunk = _chunk(k_cBGCK, chunks(w_BTGK), chunks(beta_BTG[..., None]))

    def body(carry: tuple[Array, Array], xs: tuple[Any, ...]) -> tuple[tuple[Array, Array], None]:
        number, k_BGCK, w_BGCK, t_BGCC = xs

        def walk(x_SK: Array) -> Array:
            return x_SK - _float32(_float32(_float32(x_SK, w_BGCK.mT), t_BGCC.mT), w_BGCK)

        old_BGSK, new_cBGCK = map(walk, carry)
        return (old_BGSK, new_cBGCK.at[number].set(k_BGCK)), None

    old_BGSK = jnp.moveaxis(old_BSGK.astype(jnp.float32), 1, 2)
    carry = old_BGSK, jnp.zeros(k_cBGCK.shape, jnp.float32)
    xs = jnp.arange(len(k_cBGCK)), _at_end(k_cBGCK, chunk), chunk.w_CK, chunk.t_CC
    (old_BGSK, new_cBGCK), _ = lax.scan(body, carry, xs)
    return jnp.moveaxis(old_BGSK, 2, 1), _tokens(new_cBGCK)[:, :seq_len]


def _chunk(k_CK: Array, w_CK: Array, beta_C1: Array) -> Chunk:
    """Return the `Chunk` matrices for chunks [c, B, H, C, ...]."""
    below = jnp.tri(w_CK.shape[-2], k=-1, dtype=jnp.float32)
    inverse_CC = kernels_pallas.unit_lower_inverse(below * beta_C1 * _float32(w_CK, w_CK.mT))
    t_CC = inverse_CC * beta_C1.mT
    return Chunk(w_CK, t_CC, _float32(t_CC, below * _float32(w_CK, k_CK.mT)))


def _at_end(k_CK: Array, chunk: Chunk) -> Array:
    """Return keys [c, B, H, C, K] times the later matrices of their chunk, float32."""
    return k_CK - _float32(chunk.twk_CC.mT, chunk.w_CK)


def _chunks(x_BTHK: Array, *, size: int) -> Array:
    """Return [c, B, H, C, K]; zero tokens pad the last chunk.

    The matrices of zero tokens are I, and no query attends to them.
    """
    n_batch, seq_len, heads, width = x_BTHK.shape
    x_BTHK = jnp.pad(x_BTHK, ((0, 0), (0, -seq_len % size), (0, 0), (0, 0)))
    return x_BTHK.reshape(n_batch, -1, size, heads, width).transpose(1, 0, 3, 2, 4)


def _tokens(x_cBHCK: Array) -> Array:
    """Return [B, T, H, K] from chunks."""
    count, n_batch, heads, size, width = x_cBHCK.shape
    return x_cBHCK.transpose(1, 0, 3, 2, 4).reshape(n_batch, count * size, heads, width)
