"""Chunk selection as one Pallas kernel for Hopper's matrix units.

    exact     sel_i = argmax over full past chunks c of sum_{j in c} 2^(x_ij),  x = scale log2(e) q . k
    best_key  sel_i = argmax over full past chunks c of max_{j in c} q_i . k_j

    operand  shape          dtype
    q        [B, T', H, K]  bf16 or fp16; T' is T padded to whole tiles
    k        [B, T, G, K]   as q
    sel      [B, H, T']     int32

A program scores a tile (groups * rows queries, one head) against all full past chunks. One warpgroup copies keys into a
ring in shared memory. Each other warpgroup takes `rows` queries, waits for the matrix product with a block of keys, and
sums 2^x or takes the maximum (masses.py). Warpgroups are not synchronised: while one waits for its product, another
uses the other units.

`rows` divides the chunk, so all rows of a warpgroup lie in one chunk. Each warpgroup's loop therefore ends with its
past, and no score is masked. Source: arXiv 2505.18522, Top-1 Chunk (Exact).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic_gpu
from kernels_pallas.select_chunk.mosaic_gpu.masses import Sizes, best_chunks


def scratch(n: Sizes) -> list:
    """Return the kernel's shared memory and barriers.

    Memory: q, the ring of keys, the result. Barriers: q has arrived, keys have arrived, a slot is free.
    """
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return [
        plgpu.SMEM((n.groups, n.rows, n.K), n.dtype, transforms=tiled),
        plgpu.SMEM((n.stages, n.block, n.K), n.dtype, transforms=tiled),
        plgpu.SMEM((n.groups, n.rows), jnp.int32),
        plgpu.Barrier(num_barriers=n.groups),
        plgpu.Barrier(num_barriers=n.stages),
        plgpu.Barrier(num_arrivals=n.groups, num_barriers=n.stages),
    ]


def select_kernel(
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
    """Write sel [B, H, T'] from q [B, T', H, K] and k [B, T, G, K].

    T' is a multiple of the tile. Programs with the same head run together, so its keys stay in the L2 cache; the
    longest start first.
    """
    program, group = lax.axis_index("tile"), lax.axis_index("group")
    tile, bh = n.tiles - 1 - lax.rem(program, n.tiles), lax.div(program, n.tiles)
    b, h = lax.div(bh, n.H), lax.rem(bh, n.H)
    per_chunk = n.C // n.block

    def chunks(group: Any) -> Any:
        """Return how many full past chunks the rows of a warpgroup have."""
        return jnp.minimum(lax.div((tile * n.groups + group) * n.rows, n.C), n.full)

    most = chunks(n.groups - 1)

    @pl.when(group == n.groups)
    def _copy() -> None:
        @pl.loop(0, most * per_chunk)
        def _(i: Array) -> None:
            slot = lax.rem(i, n.stages)
            pl.when(i >= n.stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
            block = jnp.minimum(i, n.full * per_chunk - 1)
            keys = k_ref.at[b, pl.ds(block * n.block, n.block), lax.div(h, n.R)]
            plgpu.copy_gmem_to_smem(keys, k_smem.at[slot], k_there.at[slot])

        total = most * per_chunk

        @pl.loop(jnp.maximum(total - n.stages, 0), total)
        def _(i: Array) -> None:  # waits for every barrier phase, as the interpreter requires
            plgpu.barrier_wait(k_free.at[lax.rem(i, n.stages)])

    @pl.when(group < n.groups)
    def _compute() -> None:
        row = (tile * n.groups + group) * n.rows
        plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds(row, n.rows), h], q_smem.at[group], q_there.at[group])
        plgpu.barrier_wait(q_there.at[group])
        own = chunks(group)
        sel_M = best_chunks(q_smem.at[group], k_smem, k_there, k_free, own, n=n)

        @pl.loop(own * per_chunk, most * per_chunk)
        def _(i: Array) -> None:  # keys for later warpgroups only; a slot is free once all warpgroups pass it
            slot = lax.rem(i, n.stages)
            plgpu.barrier_wait(k_there.at[slot])
            plgpu.barrier_arrive(k_free.at[slot])

        sel_smem.at[group][...] = sel_M.astype(jnp.int32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sel_smem.at[group], sel_ref.at[b, h, pl.ds(row, n.rows)])
        plgpu.wait_smem_to_gmem(0)


def call(n: Sizes, B: int, T: int, *, interpret: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the kernel as a function of q and k."""
    return mosaic_gpu.kernel(
        partial(select_kernel, n=n),
        out_type=jax.ShapeDtypeStruct((B, n.H, T), jnp.int32),
        scratch_types=scratch(n),
        grid=(B * n.H * n.tiles,),
        grid_names=("tile",),
        num_threads=n.groups + 1,
        thread_name="group",
        interpret=interpret,
    )
