"""Invert batches of unit lower triangular matrices.

Every delta rule needs one inverse per chunk. X = (I + M)^{-1} for a strictly lower triangular, hence nilpotent, M.
Diagonal blocks of 8 rows use the finite Neumann product (I - M)(I + M^2)(I + M^4). Then neighbouring blocks are merged
until one is left:

    [[A, 0], [C, B]]^{-1} = [[A', 0], [-B' C A', B']]

The Neumann product for the whole matrix would be simpler, but its factors grow like binomial coefficients. For a chunk
of 64 equal keys (M all ones below the diagonal, X with entries 0 and +-1) M^32 reaches 1e18, beyond float32's
precision. In blocks of 8 the largest factor is 35. Products use float32 at the highest precision, because the default
on NVIDIA GPUs is TF32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

BLOCK = 8
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def unit_lower_inverse(m_CC: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """Return (I + M)^{-1}, float32 or float64.

    M must be strictly lower triangular; this is not checked.
    """
    x_CC: Any = _inverse(m_CC)
    return x_CC


@jax.custom_vjp
def _inverse(m_CC: Array) -> Array:
    n = m_CC.shape[-1]
    block = min(BLOCK, n)
    size = block
    while size < n:
        size *= 2
    pad = [(0, 0)] * (m_CC.ndim - 2) + [(0, size - n)] * 2
    m_CC = jnp.pad(m_CC, pad)
    x = _neumann(_blocks(m_CC, block, offset=0, step=block))
    while block < size:
        a, b = x[..., ::2, :, :], x[..., 1::2, :, :]
        c = _blocks(m_CC, block, offset=block, step=2 * block)
        low = -_matmul(_matmul(b, c), a)
        top, bottom = jnp.concatenate([a, jnp.zeros_like(a)], -1), jnp.concatenate([low, b], -1)
        x = jnp.concatenate([top, bottom], -2)
        block *= 2
    return x[..., 0, :n, :n]


def _blocks(m_CC: Array, size: int, *, offset: int, step: int) -> Array:
    """Return the blocks at every `step`-th column, [..., n, size, size].

    A block starts `offset` rows below the diagonal.
    """
    columns = range(0, m_CC.shape[-1], step)
    return jnp.stack([m_CC[..., j + offset : j + offset + size, j : j + size] for j in columns], -3)


def _neumann(m: Array) -> Array:
    """Return (I + M)^{-1} by doubling the power of M.

    The result is exact once the power reaches the matrix size.
    """
    n = m.shape[-1]
    x, power, exponent = jnp.eye(n, dtype=m.dtype) - m, m, 2
    while exponent < n:
        power = _matmul(power, power)
        x = x + _matmul(x, power)
        exponent *= 2
    return x


def _forward(m_CC: Array) -> tuple[Array, Array]:
    # The checkpoint name lets a rematerialised op save the inverse: it is small and expensive to recompute.
    x_CC = checkpoint_name(_inverse(m_CC), "chunk_inverse")
    return x_CC, x_CC


def _backward(x_CC: Array, g_CC: Array) -> tuple[Array]:
    """Return the gradient of M, -X^T G X^T below the diagonal."""
    xt_CC = jnp.swapaxes(x_CC, -1, -2)
    return (-jnp.tril(_matmul(_matmul(xt_CC, g_CC), xt_CC), -1),)


_inverse.defvjp(_forward, _backward)
