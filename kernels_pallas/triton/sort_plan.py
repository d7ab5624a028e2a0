"""Sort rows by the chunk that they selected, and cut them into work items.

One kernel counts and one places (sort_plan_kernels.py); XLA computes the running sums between them, over small arrays
(tiles x chunks). An item has at most `size` rows that share a chunk. How many items a chunk gets depends on the data,
but the total is bounded:

    sum_c ceil(count_c / size) <= floor(rows / size) + number of chunks

Kernels over items therefore have a static grid, and programs after the last item return at once. A query that selects
k chunks has k consecutive rows, and `make` gets T = k * queries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton import sort_plan_kernels as kernels
from kernels_pallas.triton.blocks import padded


class Plan(NamedTuple):
    """Sorted rows: order[first[c]:first[c + 1]] are chunk c's rows, in time order."""

    order_BHT: Array  # int32; omits rows without a selection; entries from first[NC] on are undefined
    first_BHc: Array  # int32 [B, H, NC + 1]


def make(sel_BTH: Array, n_chunks: int) -> Plan:
    """Return the plan for every batch entry and query head.

    The selections are among `n_chunks` chunks; -1 is none.
    """
    B, T, H = sel_BTH.shape
    tile, sub, block = (32, 16, 32) if interpreter.is_chosen() else (128, 32, 1024)
    tile = max(tile, padded(n_chunks // 8))  # at most 8 counts per row, so memory stays linear in T
    tiles = -(-T // tile)
    rank_BHT, count_BHtc = runtime.launch(
        kernels.rank_kernel,
        sel_BTH,
        out_shape=[
            jax.ShapeDtypeStruct((B, H, T), jnp.int32),
            jax.ShapeDtypeStruct((B, H, tiles, n_chunks), jnp.int32),
        ],
        grid=(tiles * B * H,),
        num_warps=min(tile // 32, 16) if tile > 128 else 4,
        name="top1_chunk_rank",
        T=T,
        H=H,
        NC=n_chunks,
        TILE=tile,
        SUB=sub,
    )
    upto_BHtc = jnp.cumsum(count_BHtc, axis=2)
    end_BHc = jnp.cumsum(upto_BHtc[:, :, -1], axis=2)
    first_BHc = jnp.pad(end_BHc, ((0, 0), (0, 0), (1, 0)))
    base_BHtc = upto_BHtc - count_BHtc + first_BHc[:, :, None, :-1]
    (order_BHT,) = runtime.launch(
        kernels.place_kernel,
        sel_BTH,
        rank_BHT,
        base_BHtc,
        out_shape=[jax.ShapeDtypeStruct((B, H, T), jnp.int32)],
        grid=(-(-T // block) * B * H,),
        name="top1_chunk_place",
        T=T,
        H=H,
        NC=n_chunks,
        TILE=tile,
        BLOCK=block,
    )
    return Plan(order_BHT, first_BHc)


def item_ends(plan: Plan, size: int) -> Array:
    """Return [B, H, NC] int32: how many items of `size` rows chunks 0 to c have."""
    return jnp.cumsum(-(-jnp.diff(plan.first_BHc, axis=2) // size), axis=2)


def most_items(rows: int, n_chunks: int, size: int) -> int:
    """Return how many items suffice for `rows` rows.

    Each row selects one of `n_chunks` chunks.
    """
    return rows // size + min(n_chunks, rows)


def most_rows(T: int, C: int, top_k: int) -> int:
    """Return an upper bound on the rows with a selection, for T queries in chunks of C.

    A query in chunk n has n past chunks, so only T - i C queries make an i-th selection.
    """
    return sum(max(0, T - i * C) for i in range(1, top_k + 1))
