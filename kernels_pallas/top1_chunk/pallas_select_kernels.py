"""Chunk selection (exact) as one Pallas kernel for Hopper's matrix units.

A program scores a tile of queries against every full past chunk. One warpgroup copies keys into a ring in shared
memory; the others take `rows` queries each, wait for the matrix product of a block of keys, and sum 2^x over it, where
x = scale log2(e) q . k. Nothing makes them march in step, so while one waits for its product another keeps the
special-function unit busy. `style` says how one warpgroup overlaps with itself as well:

    plain    one accumulator: product, then exponentials
    pair     two chunks at a time: the second product runs under the first one's exponentials
    halves   two halves of its rows at a time, likewise

No accumulator is in flight from one turn of a loop to the next: the assembler would then serialise every product.

All rows of a warpgroup lie in one chunk (`rows` divides the chunk), so a warpgroup's loop ends where its past does, and
no score is ever masked.

bounded      |x| is at most BOUND: chunks compare by sum_j 2^x, without a maximum or a logarithm, and `poly` of every 8
             exponentials are made on the multiply-add units (the polynomial of triton_select_kernels.py)
otherwise    by log-sum-exp, with one maximum per block of keys
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import compat

LOG2_E = 1 / math.log(2)
STYLES = ("plain", "pair", "halves")
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


def scratch(n: Sizes) -> list:
    """Shared memory and barriers: q, the ring of keys, the result; q and keys are there, a slot is free."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return [
        plgpu.SMEM((n.groups, n.rows, n.K), n.dtype, transforms=tiled),
        plgpu.SMEM((n.stages, n.block, n.K), n.dtype, transforms=tiled),
        plgpu.SMEM((n.groups, n.rows), jnp.int32),
        plgpu.Barrier(num_barriers=n.groups),
        plgpu.Barrier(num_barriers=n.stages),
        plgpu.Barrier(num_arrivals=n.groups, num_barriers=n.stages),
    ]


def exact_kernel(
    q_ref: Any,
    k_ref: Any,
    sel_ref: Any,
    q_smem: Any,
    k_smem: Any,
    sel_smem: Any,
    q_there: Any,
    k_there: Any,
    k_free: Any,
    *,
    n: Sizes,
) -> None:
    """Writes sel [B, H, T] from q [B, T, H, K] and k [B, T, G, K]; T of q and sel is a multiple of the tile.

    Programs of one head run together (its keys stay in the L2 cache), the longest first.
    """
    program, group = lax.axis_index("tile"), lax.axis_index("group")
    tile, bh = n.tiles - 1 - lax.rem(program, n.tiles), lax.div(program, n.tiles)
    b, h = lax.div(bh, n.H), lax.rem(bh, n.H)
    per_chunk = n.C // n.block

    def chunks(group: Any) -> Any:
        """How many full past chunks the rows of a warpgroup have."""
        return jnp.minimum(lax.div((tile * n.groups + group) * n.rows, n.C), n.full)

    most = chunks(n.groups - 1)
    if n.style == "pair":
        most = 2 * lax.div(most + 1, 2)  # the last chunk may be one of nobody's past; it is loaded and not compared

    @pl.when(group == n.groups)
    def _copy() -> None:
        if n.registers:
            plgpu.set_max_registers(n.registers[1], action="decrease")

        @pl.loop(0, most * per_chunk)
        def _(i: Array) -> None:
            slot = lax.rem(i, n.stages)
            pl.when(i >= n.stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
            block = jnp.minimum(i, n.full * per_chunk - 1)
            keys = k_ref.at[b, pl.ds(block * n.block, n.block), lax.div(h, n.R)]
            plgpu.copy_gmem_to_smem(keys, k_smem.at[slot], k_there.at[slot])

        total = most * per_chunk

        @pl.loop(jnp.maximum(total - n.stages, 0), total)
        def _(i: Array) -> None:  # leaves no phase of a barrier unseen, which the interpreter wants
            plgpu.barrier_wait(k_free.at[lax.rem(i, n.stages)])

    @pl.when(group < n.groups)
    def _compute() -> None:
        if n.registers:
            plgpu.set_max_registers(n.registers[0], action="increase")
        row = (tile * n.groups + group) * n.rows
        plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds(row, n.rows), h], q_smem.at[group], q_there.at[group])
        plgpu.barrier_wait(q_there.at[group])
        own = chunks(group)
        select = {"plain": _plain, "pair": _pair, "halves": _halves}[n.style]
        sels = select(q_smem.at[group], k_smem, k_there, k_free, own, n=n)
        steps: Any = 2 * lax.div(own + 1, 2) if n.style == "pair" else own

        @pl.loop(steps * per_chunk, most * per_chunk)
        def _(i: Array) -> None:  # keys that only later warpgroups need; a slot is free once all have passed it
            slot = lax.rem(i, n.stages)
            plgpu.barrier_wait(k_there.at[slot])
            plgpu.barrier_arrive(k_free.at[slot])

        height = n.rows // len(sels)
        for i, sel_M in enumerate(sels):
            sel_smem.at[group, pl.ds(i * height, height)][...] = sel_M.astype(jnp.int32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sel_smem.at[group], sel_ref.at[b, h, pl.ds(row, n.rows)])
        plgpu.wait_smem_to_gmem(0)


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


def call(n: Sizes, B: int, T: int, *, interpret: bool, semantics: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The kernel as a function of q and k."""
    return compat.mosaic_kernel(
        exact_kernel,
        out_type=jax.ShapeDtypeStruct((B, n.H, T), jnp.int32),
        scratch_types=scratch(n),
        grid=(B * n.H * n.tiles,),
        grid_names=("tile",),
        num_threads=n.groups + 1,
        thread_name="group",
        interpret=interpret,
        semantics=semantics,
        n=n,
    )
