"""Log-linear attention: a per-head decay, the past in blocks of a Fenwick tree.

    y_t = sum over s <= t of m_t^(l(t, s)) exp(g_t - g_s) (c_t . b_s) x_s,   g the running sum of log a
    l(t, s) = 0 for s = t, else 1 + the number of the highest bit in which t and s differ, at most L - 1

Guo et al., arXiv 2506.04761; public implementation: flash-linear-attention, `fla/ops/log_linear_attn/naive.py` at
bc3b101. Its later versions divide scores by sqrt(N); Mamba-2 and this op do not. If all m are 1, the op equals `ssd`.
The tokens before t form blocks of 1, 2, 4, ... tokens, one for each set bit of t, and each block has a state:

    S^(l) = sum over s in the block of exp(g_t - g_s) b_s x_s^T,   y_t = sum over l of m_t^(l) c_t S_t^(l)

Each new token merges blocks, like carries in a binary counter. Training computes all pairs within a chunk at once.
Then, for blocks of two chunks, four, ..., the second half reads the state of the first: log2(T / C) products in total.
Decays, states and sums are float32; products use the dtype of `x_BTHV`. The backward pass recomputes everything.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from seqjax.ops.ssd import FLOOR
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 64
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def level(later: np.ndarray | int, earlier: np.ndarray | int, n_levels: int) -> np.ndarray | np.integer:
    """Return l(t, s) for positions s <= t, with `n_levels` levels."""
    _, exponent = np.frexp(np.bitwise_xor(later, earlier).astype(np.float64))  # 0 for 0, i + 1 for 2^i
    return np.minimum(exponent, n_levels - 1)


def log_linear(
    x_BTHV: Float[Array, "B T H V"],
    log_a_BTH: Float[Array, "B T H"],
    b_BTN: Float[Array, "B T N"],
    c_BTN: Float[Array, "B T N"],
    m_BTHL: Float[Array, "B T H L"],
    *,
    chunk_size: int = CHUNK,
) -> Float[Array, "B T H V"]:
    """Return the outputs of a sequence from its first token, [B, T, H, V].

    They have the dtype of `x_BTHV`, which must already be multiplied by the step sizes. `log_a_BTH` is at most 0. The
    result does not depend on `chunk_size`, which is rounded down to a power of two.
    """
    x_BTHV, log_a_BTH, m_BTHL = (time_to_heads(x) for x in (x_BTHV, log_a_BTH, m_BTHL))
    run = jax.checkpoint(functools.partial(_log_linear, chunk_size=chunk_size))
    return heads_to_time(run(x_BTHV, log_a_BTH, gather_time(b_BTN), gather_time(c_BTN), m_BTHL))


def _log_linear(
    x_BTHV: Array, log_a_BTH: Array, b_BTN: Array, c_BTN: Array, m_BTHL: Array, *, chunk_size: int
) -> Array:
    n_batch, seq_len, n_heads, n_value = x_BTHV.shape
    dtype, n_levels = x_BTHV.dtype, m_BTHL.shape[-1]
    size = 1 << min(chunk_size.bit_length() - 1, (seq_len - 1).bit_length())
    n_chunks = 1 << (-(-seq_len // size) - 1).bit_length()

    def chunks(x_BT: Array) -> Array:
        x_BT = jnp.pad(x_BT, ((0, 0), (0, n_chunks * size - seq_len), *[(0, 0)] * (x_BT.ndim - 2)))
        return x_BT.reshape(n_batch, n_chunks, size, *x_BT.shape[2:])

    log_a_BTH = jnp.maximum(log_a_BTH.astype(jnp.float32), FLOOR)
    x_BcCHV, b_BcCN, c_BcCN, m_BcCHL = map(chunks, (x_BTHV, b_BTN, c_BTN, m_BTHL.astype(jnp.float32)))
    g_BcCH = jnp.cumsum(chunks(log_a_BTH), axis=2)  # from the start of a block; the first blocks are chunks

    # Within chunks. All chunks have the same levels.
    levels_CC = level(np.arange(size)[:, None], np.arange(size), n_levels)
    factor_BcCCH = sum(
        jnp.where((levels_CC == i)[..., None], m_BcCHL[:, :, :, None, :, i], 0.0) for i in range(levels_CC.max() + 1)
    )
    later_CC = np.tri(size, dtype=bool)[..., None]
    decay_BcCCH = jnp.exp(jnp.where(later_CC, g_BcCH[:, :, :, None] - g_BcCH[:, :, None], -jnp.inf))
    scores_BcCC = _einsum("bcin,bcjn->bcij", c_BcCN, b_BcCN)
    weights_BcCCH = (scores_BcCC[..., None] * decay_BcCCH * factor_BcCCH).astype(dtype)
    y_BcCHV = _einsum("bcijh,bcjhv->bcihv", weights_BcCCH, x_BcCHV)

    # The second half of a block reads the first half's state; then the halves merge.
    total_BcH = g_BcCH[:, :, -1]
    kept_BcCHV = (jnp.exp(total_BcH[:, :, None] - g_BcCH)[..., None] * x_BcCHV).astype(dtype)
    s_BcHNV = _einsum("bcjn,bcjhv->bchnv", b_BcCN, kept_BcCHV)
    while s_BcHNV.shape[1] > 1:
        size = g_BcCH.shape[2]
        at = min(size.bit_length(), n_levels - 1)  # 1 + log2 of the size
        halves = [x.reshape(n_batch, -1, 2, *x.shape[2:]) for x in (y_BcCHV, g_BcCH, c_BcCN, m_BcCHL)]
        (y_first, y_second), (g_first, g_second), (_, c_second), (_, m_second) = (
            (x[:, :, 0], x[:, :, 1]) for x in halves
        )
        first, second = s_BcHNV[:, ::2], s_BcHNV[:, 1::2]
        read = _einsum("bcin,bchnv->bcihv", c_second, first.astype(dtype))
        y_second += read * (jnp.exp(g_second) * m_second[..., at])[..., None]
        s_BcHNV = second + jnp.exp(total_BcH[:, 1::2])[..., None, None] * first
        g_second += total_BcH[:, ::2, None]
        total_BcH = total_BcH[:, ::2] + total_BcH[:, 1::2]
        y_BcCHV, g_BcCH = jnp.concatenate([y_first, y_second], 2), jnp.concatenate([g_first, g_second], 2)
        c_BcCN, m_BcCHL = (x.reshape(n_batch, -1, 2 * size, *x.shape[4:]) for x in halves[2:])
    return y_BcCHV.reshape(n_batch, -1, n_heads, n_value)[:, :seq_len].astype(dtype)


def log_linear_states(
    x_BTHV: Float[Array, "B T H V"], log_a_BTH: Float[Array, "B T H"], b_BTN: Float[Array, "B T N"], *, n_levels: int
) -> Float[Array, "B L H N V"]:
    """Return the states of levels 1 to `n_levels` after the last token, float32.

    A level without a block has zeros.
    """
    n_batch, seq_len, n_heads, n_value = x_BTHV.shape
    g_BTH = jnp.cumsum(jnp.maximum(log_a_BTH.astype(jnp.float32), FLOOR), axis=1)
    kept_BTHV = jnp.exp(g_BTH[:, -1:] - g_BTH)[..., None] * x_BTHV
    s_LBHNV = [jnp.zeros((n_batch, n_heads, b_BTN.shape[-1], n_value), jnp.float32)] * n_levels
    levels = level(seq_len, np.arange(seq_len), n_levels + 1)
    for at in np.unique(levels).tolist():
        (where,) = np.nonzero(levels == at)
        block = slice(where[0], where[-1] + 1)
        s_LBHNV[at - 1] = _einsum("bjn,bjhv->bhnv", b_BTN[:, block].astype(jnp.float32), kept_BTHV[:, block])
    return jnp.stack(s_LBHNV, axis=1)


def log_linear_step(
    x_BHV: Float[Array, "B H V"],
    log_a_BH: Float[Array, "B H"],
    b_BN: Float[Array, "B N"],
    c_BN: Float[Array, "B N"],
    m_BHL: Float[Array, "B H L"],
    states_BLHNV: Float[Array, "B l H N V"],
    length: Array,
) -> tuple[Float[Array, "B H V"], Float[Array, "B l H N V"]]:
    """Return the output of the token after `length` tokens, and the new states.

    The states have levels 1 to l; l is below L - 1 if no sequence can be long enough for more.
    """
    n_levels = states_BLHNV.shape[1]
    levels_L = jnp.arange(1, n_levels + 1)
    states_BLHNV = jnp.exp(jnp.maximum(log_a_BH.astype(jnp.float32), FLOOR))[:, None, :, None, None] * states_BLHNV
    new_BHNV = b_BN.astype(jnp.float32)[:, None, :, None] * x_BHV.astype(jnp.float32)[:, :, None]
    every_BLHNV = jnp.concatenate([new_BHNV[:, None], states_BLHNV], 1)
    m_BLH = jnp.moveaxis(m_BHL[..., : n_levels + 1].astype(jnp.float32), -1, 1)
    y_BHV = jnp.einsum("bn,blhnv,blh->bhv", c_BN.astype(jnp.float32), every_BLHNV, m_BLH)
    # The lowest unset bit of `length` receives the carry from the bits below it.
    carry = jnp.minimum(jax.lax.population_count(length & ~(length + 1)) + 1, n_levels)
    closes_L = (levels_L < carry)[:, None, None, None]
    closed_BHNV = new_BHNV + jnp.where(closes_L, states_BLHNV, 0).sum(1)
    states_BLHNV = jnp.where(closes_L, 0, states_BLHNV)
    states_BLHNV += jnp.where((levels_L == carry)[:, None, None, None], closed_BHNV[:, None], 0)
    return y_BHV.astype(x_BHV.dtype), states_BLHNV
