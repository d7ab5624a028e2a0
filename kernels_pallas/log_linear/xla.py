"""The `xla` backend of log-linear attention: chunked products, differentiated by JAX.

All pairs within a chunk are computed at once. Then, for blocks of two chunks, four, ..., the second half reads the
state of the first: log2(T / Q) products in total. The backward pass recomputes everything.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.log_linear.interface import LogLinear
from kernels_pallas.log_linear.levels import level


def load() -> LogLinear:
    """Return this module."""
    from kernels_pallas.log_linear import xla

    return xla


BACKEND = Backend("xla", load)


def run(x_BTHV: Array, log_a_BTH: Array, b_BTN: Array, c_BTN: Array, m_BTHL: Array, *, chunk_size: int) -> Array:
    """Return y [B, T, H, V]."""
    return jax.checkpoint(functools.partial(_log_linear, chunk_size=chunk_size))(
        x_BTHV, log_a_BTH, b_BTN, c_BTN, m_BTHL
    )


def _log_linear(
    x_BTHV: Array, log_a_BTH: Array, b_BTN: Array, c_BTN: Array, m_BTHL: Array, *, chunk_size: int
) -> Array:
    n_batch, seq_len, n_heads, n_value = x_BTHV.shape
    dtype, n_levels = x_BTHV.dtype, m_BTHL.shape[-1]
    product = functools.partial(jnp.einsum, preferred_element_type=log_a_BTH.dtype)
    size = 1 << min(chunk_size.bit_length() - 1, (seq_len - 1).bit_length())
    n_chunks = 1 << (-(-seq_len // size) - 1).bit_length()

    def chunks(x_BT: Array) -> Array:
        x_BT = jnp.pad(x_BT, ((0, 0), (0, n_chunks * size - seq_len), *[(0, 0)] * (x_BT.ndim - 2)))
        return x_BT.reshape(n_batch, n_chunks, size, *x_BT.shape[2:])

    x_BcCHV, b_BcCN, c_BcCN, m_BcCHL = map(chunks, (x_BTHV, b_BTN, c_BTN, m_BTHL))
    g_BcCH = jnp.cumsum(chunks(log_a_BTH), axis=2)  # from the start of a block; the first blocks are chunks

    # Within chunks. All chunks have the same levels.
    levels_CC = level(np.arange(size)[:, None], np.arange(size), n_levels)
    factor_BcCCH = sum(
        jnp.where((levels_CC == i)[..., None], m_BcCHL[:, :, :, None, :, i], 0.0) for i in range(levels_CC.max() + 1)
    )
    later_CC = np.tri(size, dtype=bool)[..., None]
    decay_BcCCH = jnp.exp(jnp.where(later_CC, g_BcCH[:, :, :, None] - g_BcCH[:, :, None], -jnp.inf))
    scores_BcCC = product("bcin,bcjn->bcij", c_BcCN, b_BcCN)
    weights_BcCCH = (scores_BcCC[..., None] * decay_BcCCH * factor_BcCCH).astype(dtype)
    y_BcCHV = product("bcijh,bcjhv->bcihv", weights_BcCCH, x_BcCHV)

    # The second half of a block reads the first half's state; then the halves merge.
    total_BcH = g_BcCH[:, :, -1]
    kept_BcCHV = (jnp.exp(total_BcH[:, :, None] - g_BcCH)[..., None] * x_BcCHV).astype(dtype)
    s_BcHNV = product("bcjn,bcjhv->bchnv", b_BcCN, kept_BcCHV)
    while s_BcHNV.shape[1] > 1:
        size = g_BcCH.shape[2]
        at = min(size.bit_length(), n_levels - 1)  # 1 + log2 of the size
        halves = [x.reshape(n_batch, -1, 2, *x.shape[2:]) for x in (y_BcCHV, g_BcCH, c_BcCN, m_BcCHL)]
        (y_first, y_second), (g_first, g_second), (_, c_second), (_, m_second) = (
            (x[:, :, 0], x[:, :, 1]) for x in halves
        )
        first, second = s_BcHNV[:, ::2], s_BcHNV[:, 1::2]
        read = product("bcin,bchnv->bcihv", c_second, first.astype(dtype))
        y_second += read * (jnp.exp(g_second) * m_second[..., at])[..., None]
        s_BcHNV = second + jnp.exp(total_BcH[:, 1::2])[..., None, None] * first
        g_second += total_BcH[:, ::2, None]
        total_BcH = total_BcH[:, ::2] + total_BcH[:, 1::2]
        y_BcCHV, g_BcCH = jnp.concatenate([y_first, y_second], 2), jnp.concatenate([g_first, g_second], 2)
        c_BcCN, m_BcCHL = (x.reshape(n_batch, -1, 2 * size, *x.shape[4:]) for x in halves[2:])
    return y_BcCHV.reshape(n_batch, -1, n_heads, n_value)[:, :seq_len].astype(dtype)
