"""The `xla` backend of PaTH attention: all chunks at once, then a scan over the chunks.

All arithmetic is float32, except the products of queries, keys and values. The backward pass computes everything again.
Equations: `path_attention/api.py`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.chunks import from_chunks, to_chunks
from kernels_pallas.path_attention.interface import PathAttention
from kernels_pallas.path_walk import xla as walk
from kernels_pallas.triangular import unit_lower_inverse

_float32 = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def load() -> PathAttention:
    """Return this module."""
    from kernels_pallas.path_attention import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    w_BTGK: Array,
    beta_BTG: Array,
    log_f_BTH: Array | None,
    *,
    chunk_size: int,
) -> Array:
    """Return o_BTHV."""
    attend = jax.checkpoint(functools.partial(_attend, chunk_size=chunk_size))
    return attend(q_BTHK, k_BTGK, v_BTGV, w_BTGK, beta_BTG, log_f_BTH)


def _attend(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    w_BTGK: Array,
    beta_BTG: Array,
    log_f_BTH: Array | None,
    *,
    chunk_size: int,
) -> Array:
    seq_len, heads, width = q_BTHK.shape[1:]
    dtype = k_BTGK.dtype
    repeats = heads // k_BTGK.shape[2]
    k_BTHK, v_BTHV, w_BTHK, beta_BTH = (jnp.repeat(x, repeats, axis=2) for x in (k_BTGK, v_BTGV, w_BTGK, beta_BTG))
    chunks = functools.partial(to_chunks, chunk=chunk_size)
    q_cBHCK, k_cBHCK, v_cBHCV = chunks(q_BTHK * width**-0.5), chunks(k_BTHK), chunks(v_BTHV)
    w_cBHCK, beta_cBHC1 = chunks(w_BTHK), chunks(beta_BTH[..., None])
    below_CC = jnp.tri(chunk_size, k=-1, dtype=jnp.float32)
    t_cBHCC = unit_lower_inverse(below_CC * beta_cBHC1 * _float32(w_cBHCK, w_cBHCK.mT)) * beta_cBHC1.mT
    twk_cBHCC = _float32(t_cBHCC, below_CC * _float32(w_cBHCK, k_cBHCK.mT))
    forgotten_cBHC1 = None if log_f_BTH is None else chunks(jnp.cumsum(log_f_BTH, axis=1)[..., None])

    # Keys of the query's chunk.
    qw_cBHCC, tw_cBHCK = jnp.tril(_float32(q_cBHCK, w_cBHCK.mT)), _float32(t_cBHCC, w_cBHCK)
    s_cBHCC = _float32(q_cBHCK.astype(dtype), k_cBHCK.mT.astype(dtype)) - _float32(qw_cBHCC, twk_cBHCC)
    if forgotten_cBHC1 is not None:
        s_cBHCC = s_cBHCC + forgotten_cBHC1 - forgotten_cBHC1.mT
    s_cBHCC = jnp.where(jnp.tri(chunk_size, dtype=bool), s_cBHCC, -jnp.inf)
    lse_cBHC = jax.nn.logsumexp(s_cBHCC, axis=-1)
    own_cBHCV = _float32(jnp.exp(s_cBHCC - lse_cBHC[..., None]).astype(dtype), v_cBHCV)
    if len(q_cBHCK) == 1:
        return from_chunks(own_cBHCV, seq_len).astype(q_BTHK.dtype)
    # Keys of earlier chunks, nearest chunk first.
    o_cBHCV = walk.run(
        q_cBHCK.astype(jnp.float32) - _float32(qw_cBHCC, tw_cBHCK),
        (k_cBHCK - _float32(twk_cBHCC.mT, w_cBHCK)).astype(dtype),
        v_cBHCV,
        _float32(w_cBHCK.mT, tw_cBHCK),
        None if forgotten_cBHC1 is None else forgotten_cBHC1[..., 0],
        own_cBHCV,
        lse_cBHC,
    )
    return from_chunks(o_cBHCV, seq_len).astype(q_BTHK.dtype)
