"""Select each row's past chunk: the loop of one warpgroup over its chunks.

    sel = argmax over past chunks c of score_c;  the earliest of equal chunks;  x_j = log2_scale q . k_j

    rule       score of a chunk
    mass       sum_j 2^x_j, without maximum or logarithm; |x| <= BOUND (select.py checks it)
    logsumexp  log2 sum_j 2^x_j, with one running maximum per row; any x
    best_key   max_j q . k_j; without exponentials

In `mass`, `poly` of every 8 slices of columns are exponentiated on the multiply-add units, with the coefficients in
select_chunk/triton/kernels.py. Blocks of keys are multiples of 8 and at least 16.

One accumulator holds a product and then its exponentials. The product never stays in flight across loop iterations,
because the assembler would then serialise every product. While one warpgroup waits for its product, another computes.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic_gpu
from kernels_pallas.numerics import LOG2_E

SLICE = 8  # accumulator columns that can be separated without moving registers
MAGIC = 1.5 * 2**23  # adding it rounds to an integer in the low bits
Rule = Literal["mass", "logsumexp", "best_key"]
POLYNOMIAL = (0.055171669, 0.24261113, 0.69326097, 0.99992806)  # coefficients for 2^r, |r| <= 1/2, highest power first


class Sizes(NamedTuple):
    """The static arguments of the kernel."""

    H: int
    R: int  # query heads per key-value head
    K: int
    C: int
    tiles: int  # query tiles
    full: int  # full chunks that precede some query
    dtype: Any
    log2_scale: float
    rule: Rule
    block: int  # keys per product
    rows: int  # queries per warpgroup
    groups: int  # warpgroups that compute
    stages: int  # blocks of keys in the ring
    poly: int  # of every 8 exponentials, computed with the polynomial


def _start(own: Any, height: int, *, n: Sizes) -> tuple[Array, Array]:
    """Return (best, sel) before the first chunk; sel is -1 if no chunk follows.

    In loops sel is fp32, exact up to 2^24 chunks. One of Mosaic's lowerings makes a loop index unsigned, and it would
    not fit an int32 array.
    """
    per_row = plgpu.Layout.WGMMA.reduce(1)
    best_M = jnp.full((height,), 0.0 if n.rule == "mass" else -jnp.inf, jnp.float32)
    sel_M = lax.broadcast(jnp.where(own > 0, 0.0, -1.0), (height,))
    return plgpu.layout_cast(best_M, per_row), plgpu.layout_cast(sel_M, per_row)


def _better(score_M: Array, c: Any, best_M: Array, sel_M: Array) -> tuple[Array, Array]:
    is_better_M = score_M > best_M
    sel_M = jnp.where(is_better_M, lax.broadcast(c.astype(jnp.float32), sel_M.shape), sel_M)
    return jnp.where(is_better_M, score_M, best_M), sel_M


def _keys(k_smem: Any, slot: Any) -> Any:
    return mosaic_gpu.transposed(k_smem.at[slot])


def best_chunks(q_smem: Any, k_smem: Any, k_there: Any, k_free: Any, own: Any, *, n: Sizes) -> Array:
    """Return the past chunk that each row of a warpgroup selects, fp32 [rows]; -1 if there is none.

    q is [rows, K] and the ring of keys [stages, block, K], filled by another warpgroup. All rows are in chunk `own`, so
    the past chunks are 0 to own - 1.
    """
    per_chunk = n.C // n.block

    def chunk(c: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total = None
        for piece in range(per_chunk):
            slot = lax.rem(c * per_chunk + piece, n.stages)
            plgpu.barrier_wait(k_there.at[slot])

            def product(acc: Any, slot: Any = slot) -> Array:
                plgpu.wgmma(acc, q_smem, _keys(k_smem, slot))
                return acc[...]

            s_MN = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((n.rows, n.block), jnp.float32))
            plgpu.barrier_arrive(k_free.at[slot])
            total = _add(total, s_MN, n=n)
        return _better(_score(total), c, *carry)

    return lax.fori_loop(0, own, chunk, _start(own, n.rows, n=n))[1]


def _add(total: Any, s_MN: Array, *, n: Sizes) -> Any:
    """Return a chunk's state after another block of its keys.

    The state is the mass, (largest x, mass relative to it), or the largest q . k.
    """
    if n.rule == "best_key":
        top_M = s_MN.max(axis=1)
        return top_M if total is None else jnp.maximum(total, top_M)
    if n.rule == "mass":
        mass_M = _mass(s_MN, n=n)
        return mass_M if total is None else total + mass_M
    x_MN = s_MN * n.log2_scale
    m_M = x_MN.max(axis=1) if total is None else jnp.maximum(total[0], x_MN.max(axis=1))
    mass_M = jnp.exp2(x_MN - lax.broadcast_in_dim(m_M, x_MN.shape, (0,))).sum(axis=1)
    return (m_M, mass_M) if total is None else (m_M, total[1] * jnp.exp2(total[0] - m_M) + mass_M)


def _score(total: Any) -> Array:
    """Return the score by which chunks are compared."""
    return total[0] + jnp.log(total[1]) * LOG2_E if isinstance(total, tuple) else total


def _mass(s_MN: Array, *, n: Sizes) -> Array:
    """Return sum_j 2^(log2_scale s_j).

    Slices of 8 columns are added elementwise, so lanes exchange sums only once per block.
    """
    sums: list[Any] = [None, None]
    for i in range(s_MN.shape[1] // SLICE):
        x_M8 = s_MN[:, i * SLICE : (i + 1) * SLICE] * n.log2_scale
        exp2: Callable = polynomial_exp2 if i * n.poly % 8 < n.poly else jnp.exp2
        p_M8 = exp2(x_M8)
        sums[i % 2] = p_M8 if sums[i % 2] is None else sums[i % 2] + p_M8
    return (sums[0] + sums[1]).sum(axis=1)


def polynomial_exp2(x: Array) -> Array:
    """Return 2^x, computed on the multiply-add units.

    The relative error is 8e-5, for |x| up to 100.
    """
    t = x + MAGIC
    fraction = x - (t - MAGIC)
    p = POLYNOMIAL[0] * fraction + POLYNOMIAL[1]
    for coefficient in POLYNOMIAL[2:]:
        p = p * fraction + coefficient
    exponent = lax.shift_left(lax.bitcast_convert_type(t, jnp.int32), jnp.full(t.shape, 23, jnp.int32))
    return lax.bitcast_convert_type(exponent + lax.bitcast_convert_type(p, jnp.int32), jnp.float32)
