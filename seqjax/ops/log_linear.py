"""Log-linear attention: a per-head decay, the past in blocks of a Fenwick tree.

    y_t = sum over s <= t of m_t^(l(t, s)) exp(g_t - g_s) (c_t . b_s) x_s,   g the running sum of log a
    l(t, s) = 0 for s = t, else 1 + the number of the highest bit in which t and s differ, at most L - 1

Guo et al., arXiv 2506.04761; public implementation: flash-linear-attention, `fla/ops/log_linear_attn/naive.py` at
bc3b101. Its later versions divide scores by sqrt(N); Mamba-2 and this op do not. If all m are 1, the op equals `ssd`.
The tokens before t form blocks of 1, 2, 4, ... tokens, one for each set bit of t, and each block has a state:

    S^(l) = sum over s in the block of exp(g_t - g_s) b_s x_s^T,   y_t = sum over l of m_t^(l) c_t S_t^(l)

Each new token merges blocks, like carries in a binary counter. Training computes all pairs within a chunk at once;
each chunk then reads the states of earlier blocks. Decays, states and sums are float32; products use the dtype of
`x_BTHV`. `kernels_pallas/log_linear` has the chunked form, its gradient, and the XLA and Triton backends.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import kernels_pallas
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
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """Return the outputs of a sequence from its first token, [B, T, H, V].

    They have the dtype of `x_BTHV`, which must already be multiplied by the step sizes. `log_a_BTH` is at most 0. The
    result does not depend on `chunk_size`, which is rounded down to a power of two. `implementation` is as in
    `kernels_pallas`.
    """
    x_BTHV, log_a_BTH, m_BTHL = (time_to_heads(x) for x in (x_BTHV, log_a_BTH, m_BTHL))
    log_a_BTH, m_BTHL = jnp.maximum(log_a_BTH.astype(jnp.float32), FLOOR), m_BTHL.astype(jnp.float32)
    operands = (x_BTHV, log_a_BTH, gather_time(b_BTN), gather_time(c_BTN), m_BTHL)
    return heads_to_time(kernels_pallas.log_linear(*operands, chunk_size=chunk_size, implementation=implementation))


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
