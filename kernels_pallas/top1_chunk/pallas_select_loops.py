"""How a warpgroup of pallas_select_kernels.py goes over the chunks of its past, and what it compares them by.

The style says how the warpgroup overlaps with itself, beside others:

    plain    one accumulator: product, then exponentials
    pair     two chunks at a time: the second product runs under the first one's exponentials
    halves   two halves of its rows at a time, likewise

No accumulator is in flight from one turn of a loop to the next: the assembler would then serialise every product.

bounded      |x| is at most BOUND: chunks compare by sum_j 2^x, without a maximum or a logarithm, and `poly` of every 8
             exponentials are made on the multiply-add units (the polynomial of triton_select_kernels.py)
otherwise    by log-sum-exp, with one maximum per block of keys
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import compat

LOG2_E = 1 / math.log(2)
SLICE = 8  # columns of an accumulator that can be told apart without moving registers
MAGIC = 1.5 * 2**23  # adding it rounds to an integer, which is then in the low bits
POLYNOMIAL = (0.055171669, 0.24261113, 0.69326097, 0.99992806)  # of 2^n, |n| <= 1/2, the highest power first


class Sizes(NamedTuple):
    """Everything static that a kernel is told."""

    H: int
    R: int  # query heads of a key head
    K: int
    C: int
    tiles: int  # of queries
    full: int  # chunks that have a query after them
    dtype: Any
    log2_scale: float
    bounded: bool
    block: int  # keys in one product
    rows: int  # of a warpgroup
    groups: int  # warpgroups that compute
    stages: int  # blocks of keys in the ring
    poly: int
    style: str
    registers: tuple[int, int] | None  # per thread: of warpgroups that compute, of the one that copies


def _start(own: Any, height: int, *, n: Sizes) -> tuple[Array, Array]:
    """(best, sel) before the first chunk, -1 where no chunk will come. In loops sel is fp32, exact up to 2^24 chunks:
    the index of a loop loses its sign in one of Mosaic's lowerings, and would not fit an int32 array then.
    """
    per_row = plgpu.Layout.WGMMA.reduce(1)
    best_M = jnp.full((height,), 0.0 if n.bounded else -jnp.inf, jnp.float32)
    sel_M = lax.broadcast(jnp.where(own > 0, 0.0, -1.0), (height,))
    return plgpu.layout_cast(best_M, per_row), plgpu.layout_cast(sel_M, per_row)


def _better(score_M: Array, c: Any, best_M: Array, sel_M: Array, is_past: Any = None) -> tuple[Array, Array]:
    is_better_M = score_M > best_M
    if is_past is not None:
        is_better_M &= lax.broadcast(is_past, is_better_M.shape)
    sel_M = jnp.where(is_better_M, lax.broadcast(c.astype(jnp.float32), sel_M.shape), sel_M)
    return jnp.where(is_better_M, score_M, best_M), sel_M


def _keys(k_smem: Any, slot: Any) -> Any:
    return compat.transposed(k_smem.at[slot])


def _plain(q_smem: Any, k_smem: Any, k_there: Any, k_free: Any, own: Any, *, n: Sizes) -> tuple[Array, ...]:
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

    return (lax.fori_loop(0, own, chunk, _start(own, n.rows, n=n))[1],)


def _pair(q_smem: Any, k_smem: Any, k_there: Any, k_free: Any, own: Any, *, n: Sizes) -> tuple[Array, ...]:
    def two_chunks(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        c = 2 * i
        slots = (lax.rem(c, n.stages), lax.rem(c + 1, n.stages))

        def products(first: Any, second: Any) -> tuple[Array, Array]:
            for slot, acc in zip(slots, (first, second), strict=True):
                plgpu.barrier_wait(k_there.at[slot])
                plgpu.wgmma(acc, q_smem, _keys(k_smem, slot))
            scores = []
            for slot, acc, in_flight in zip(slots, (first, second), (1, 0), strict=True):
                s_MN = plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)
                plgpu.barrier_arrive(k_free.at[slot])
                scores.append(_score(_add(None, s_MN, n=n)))
            return tuple(scores)

        acc = plgpu.WGMMAAccumulatorRef((n.rows, n.block), jnp.float32)
        first_M, second_M = pl.run_scoped(products, acc, acc)
        return _better(second_M, c + 1, *_better(first_M, c, *carry), c + 1 < own)

    return (lax.fori_loop(0, lax.div(own + 1, 2), two_chunks, _start(own, n.rows, n=n))[1],)


def _halves(q_smem: Any, k_smem: Any, k_there: Any, k_free: Any, own: Any, *, n: Sizes) -> tuple[Array, ...]:
    height = n.rows // 2
    halves = [q_smem.at[pl.ds(i * height, height)] for i in range(2)]

    def chunk(c: Array, carry: tuple) -> tuple:
        slot = lax.rem(c, n.stages)
        plgpu.barrier_wait(k_there.at[slot])

        def products(upper: Any, lower: Any) -> tuple[Array, Array]:
            for q_half, acc in zip(halves, (upper, lower), strict=True):
                plgpu.wgmma(acc, q_half, _keys(k_smem, slot))
            upper_M = _score(_add(None, plgpu.wgmma_accumulator_load(upper, wait_n=1), n=n))
            s_MN = plgpu.wgmma_accumulator_load(lower, wait_n=0)
            plgpu.barrier_arrive(k_free.at[slot])
            return upper_M, _score(_add(None, s_MN, n=n))

        acc = plgpu.WGMMAAccumulatorRef((height, n.block), jnp.float32)
        scores = pl.run_scoped(products, acc, acc)
        return tuple(_better(score_M, c, *best) for score_M, best in zip(scores, carry, strict=True))

    start = _start(own, height, n=n)
    return tuple(sel_M for _, sel_M in lax.fori_loop(0, own, chunk, (start, start)))


def _add(total: Any, s_MN: Array, *, n: Sizes) -> Any:
    """What is known of a chunk after one more block of its keys: its mass, or (largest x, mass relative to that)."""
    if n.bounded:
        mass_M = _mass(s_MN, n=n)
        return mass_M if total is None else total + mass_M
    x_MN = s_MN * n.log2_scale
    m_M = x_MN.max(axis=1) if total is None else jnp.maximum(total[0], x_MN.max(axis=1))
    mass_M = jnp.exp2(x_MN - lax.broadcast_in_dim(m_M, x_MN.shape, (0,))).sum(axis=1)
    return (m_M, mass_M) if total is None else (m_M, total[1] * jnp.exp2(total[0] - m_M) + mass_M)


def _score(total: Any) -> Array:
    """What chunks are compared by."""
    return total[0] + jnp.log(total[1]) * LOG2_E if isinstance(total, tuple) else total


def _mass(s_MN: Array, *, n: Sizes) -> Array:
    """sum_j 2^(log2_scale s_j). Slices of 8 columns add up by element, so lanes exchange sums once per block."""
    sums: list[Any] = [None, None]
    for i in range(s_MN.shape[1] // SLICE):
        x_M8 = s_MN[:, i * SLICE : (i + 1) * SLICE] * n.log2_scale
        exp2: Callable = polynomial_exp2 if i * n.poly % 8 < n.poly else jnp.exp2
        p_M8 = exp2(x_M8)
        sums[i % 2] = p_M8 if sums[i % 2] is None else sums[i % 2] + p_M8
    return (sums[0] + sums[1]).sum(axis=1)


def polynomial_exp2(x: Array) -> Array:
    """2^x on the multiply-add units, relative error 8e-5, for |x| up to 100."""
    t = x + MAGIC
    rest = x - (t - MAGIC)
    p = POLYNOMIAL[0] * rest + POLYNOMIAL[1]
    for coefficient in POLYNOMIAL[2:]:
        p = p * rest + coefficient
    exponent = lax.shift_left(lax.bitcast_convert_type(t, jnp.int32), jnp.full(t.shape, 23, jnp.int32))
    return lax.bitcast_convert_type(exponent + lax.bitcast_convert_type(p, jnp.int32), jnp.float32)


# by `style`: (q, the ring of keys, its barriers, chunks of the own past) -> sel of all rows, in one piece or two
LOOPS: dict[str, Callable] = {"plain": _plain, "pair": _pair, "halves": _halves}
