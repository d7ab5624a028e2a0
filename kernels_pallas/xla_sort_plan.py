"""Sort rows by the chunk that they read: a schedule with static shapes.

Sorted rows are cut into blocks. A row is a query position and head (xla_tiles.py). For each key-value head, rows are
sorted by selected chunk and cut into blocks of `block` rows that share a chunk. A row that selected k chunks is sorted
k times. The number of blocks per chunk depends on the data, but the total is bounded:

    sum_c ceil(count_c / block) <= floor(rows / block) + number of chunks

Shapes are therefore static, and surplus blocks are empty. The sort is stable and rows are in time order, so an earlier
row's place within its block never depends on a later row. This keeps the result causal to the last bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import xla_tiles

# Maximal rows per block. Larger blocks fill matrix units better; smaller blocks leave fewer empty slots at the end of
# each chunk's list. The upper limit is k times the rows of a chunk, the mean number of rows that select a chunk.
BLOCK = 64


class Plan(NamedTuple):
    """The schedule. Indices out of range mean "none".

    An empty slot holds row index M. A row without a selection holds the index after the last slot.
    """

    row_BGnr: Array  # [B, G, blocks, block] row in each slot
    chunk_BGn: Array  # [B, G, blocks] chunk that each block reads
    slot_BGMk: Array  # [B, G, M, k] slots of each row


def count_blocks(rows: int, n_chunks: int, block: int) -> int:
    """Return how many blocks suffice for `rows` rows.

    Each row selects one of `n_chunks` chunks.
    """
    return rows // block + min(n_chunks, rows)


def make_plan(sel_BGMk: Array, n_chunks: int, C: int, R: int) -> Plan | None:
    """Return the plan of every batch entry and key-value head.

    It is None if no row lies after the first chunk. Rows with sel = -1 get no slot. No query selects the last chunk, so
    there are n_chunks - 1 chunks to choose from.
    """
    B, G, M, top_k = sel_BGMk.shape
    # a row in chunk n selects at most n chunks
    rows = sum(max(0, M - rank * R * C) for rank in range(1, top_k + 1))
    if rows == 0:
        return None
    block = min(BLOCK, top_k * C * R)
    n_blocks = count_blocks(rows, n_chunks - 1, block)
    steps, each = xla_tiles.segments(n_blocks, B * G * block * C)
    return jax.vmap(jax.vmap(lambda sel_Mk: _make_one(sel_Mk, n_chunks, steps * each, block)))(sel_BGMk)


def _make_one(sel_Mk: Array, n_chunks: int, n_blocks: int, block: int) -> Plan:
    sel_M, top_k = sel_Mk.ravel(), sel_Mk.shape[1]  # from here on a row counts once per selected chunk
    M = sel_M.shape[0]
    key_M = jnp.where(sel_M < 0, n_chunks, sel_M)  # rows without a selection go last
    if (n_chunks + 1) * M < 2**31:  # packed chunk and row: sorts one operand, and stably
        packed_M = jnp.sort(key_M * M + jnp.arange(M, dtype=jnp.int32))
        order_M, sorted_M = packed_M % M, packed_M // M
    else:
        order_M = jnp.argsort(key_M, stable=True).astype(jnp.int32)
        sorted_M = key_M[order_M]
    first_c = jnp.searchsorted(sorted_M, jnp.arange(n_chunks + 1)).astype(jnp.int32)
    count_c = jnp.diff(first_c)
    blocks_c = -(-count_c // block)
    end_c = jnp.cumsum(blocks_c)

    block_n = jnp.arange(n_blocks, dtype=jnp.int32)
    chunk_n = jnp.searchsorted(end_c, block_n, side="right").astype(jnp.int32)
    chunk_n = jnp.minimum(chunk_n, n_chunks - 1)  # surplus blocks lie past the last chunk's list: empty
    nth_nr = (block_n - (end_c - blocks_c)[chunk_n])[:, None] * block + jnp.arange(block)
    place_nr = jnp.minimum(first_c[chunk_n][:, None] + nth_nr, M - 1)
    row_nr = jnp.where(nth_nr < count_c[chunk_n][:, None], order_M[place_nr], M)

    n_slots = n_blocks * block
    slot_M = jnp.full_like(sel_M, n_slots).at[row_nr.ravel()].set(jnp.arange(n_slots, dtype=jnp.int32), mode="drop")
    return Plan(row_nr // top_k, chunk_n, slot_M.reshape(sel_Mk.shape))


def scan_blocks(body: Callable, carry: Any, C: int, *operands: Array) -> tuple:
    """Scan `body(carry, *operands of some blocks)` over axis 2.

    A step takes as many blocks as `tile_elements()` scores allow. The first operand is [B, G, n, rows, ...]. Returns
    the carry, and the outputs concatenated along axis 2.
    """
    B, G, n, rows = operands[0].shape[:4]
    steps, each = xla_tiles.segments(n, B * G * rows * C)
    padded = tuple(xla_tiles.pad_to(x, steps * each, axis=2) for x in operands)

    def visit(carry, step):
        return body(carry, *(xla_tiles.block(x, step, each) for x in padded))

    carry, stacked = jax.lax.scan(visit, carry, jnp.arange(steps))
    merged = jax.tree.map(lambda y: _merge(jnp.moveaxis(y, 0, 2), 2)[:, :, :n], stacked)
    return carry, merged


def in_blocks(x: Array, size: int) -> Array:
    """Cut [B, G, M, ...] into [B, G, n, size, ...], padded with zeros."""
    n = -(-x.shape[2] // size)
    x = xla_tiles.pad_to(x, n * size, axis=2)
    return x.reshape(*x.shape[:2], n, size, *x.shape[3:])


def from_blocks(x: Array, length: int | None = None) -> Array:
    """Join [B, G, n, size, ...] to [B, G, length, ...]."""
    return _merge(x, 2)[:, :, :length]


def _merge(x: Array, axis: int) -> Array:
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def take(x: Array, index: Array, *, fill: float = 0) -> Array:
    """Return x[b, g, index[b, g, ...]], with `fill` where the index is out of range."""
    return jax.vmap(jax.vmap(lambda x, i: x.at[i].get(mode="fill", fill_value=fill)))(x, index)
