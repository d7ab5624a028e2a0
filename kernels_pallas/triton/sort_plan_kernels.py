"""Triton kernels of the schedule: rows sorted by the chunk that they selected, by counting.

    rank    within a tile of rows, how many earlier rows selected the same chunk, and how many rows did in all
    place   row -> its place: rows of earlier chunks, rows of the same chunk in earlier tiles, rank

The running sums between the two are small arrays (sort_plan.py). The sort is stable and uses no atomics, so two runs
give the same order, and an earlier row's place among the rows of its chunk does not depend on a later one.
"""

import triton
import triton.language as tl


@triton.jit
def rank_kernel(
    sel_ptr, rank_ptr, count_ptr,
    T: tl.constexpr, H: tl.constexpr, NC: tl.constexpr, TILE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Rank [B, H, T] and count [B, H, tiles, NC] int32 from sel [B, T, H].

    Rows with sel = -1 count nowhere.
    """
    n_tiles: tl.constexpr = (T + TILE - 1) // TILE
    pid = tl.program_id(0)
    tile, bh = pid % n_tiles, pid // n_tiles
    b, h = (bh // H).to(tl.int64), bh % H
    here_R = tl.arange(0, TILE)
    row_R = tile * TILE + here_R
    sel_ptr += b * T * H + h
    sel_R = tl.load(sel_ptr + row_R * H, mask=row_R < T, other=-1)
    rank_R = tl.zeros([TILE], tl.int32)
    total_R = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, TILE, SUB):
        other_S = start + tl.arange(0, SUB)
        row_S = tile * TILE + other_S
        sel_S = tl.load(sel_ptr + row_S * H, mask=row_S < T, other=-1)
        is_same_RS = (sel_R[:, None] == sel_S[None, :]).to(tl.int32)
        total_R += tl.sum(is_same_RS, 1)
        rank_R += tl.sum(tl.where(other_S[None, :] < here_R[:, None], is_same_RS, 0), 1)
    tl.store(rank_ptr + bh.to(tl.int64) * T + row_R, rank_R, mask=row_R < T)
    count_ptr += (bh.to(tl.int64) * n_tiles + tile) * NC
    for start in tl.range(0, NC, TILE):
        tl.store(count_ptr + start + here_R, tl.zeros([TILE], tl.int32), mask=start + here_R < NC)
    tl.debug_barrier()  # other threads of the program write the counts over these zeros
    # the last row of a chunk in this tile writes the chunk's count
    tl.store(count_ptr + sel_R, total_R, mask=(rank_R == total_R - 1) & (sel_R >= 0))


@triton.jit
def place_kernel(
    sel_ptr, rank_ptr, base_ptr, order_ptr,
    T: tl.constexpr, H: tl.constexpr, NC: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Order [B, H, T]: the rows by chunk, from base [B, H, tiles, NC], a chunk's first place for rows of each tile."""
    n_tiles: tl.constexpr = (T + TILE - 1) // TILE
    n_blocks: tl.constexpr = (T + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    bh = pid // n_blocks
    b, h = (bh // H).to(tl.int64), bh % H
    row_R = pid % n_blocks * BLOCK + tl.arange(0, BLOCK)
    sel_R = tl.load(sel_ptr + (b * T + row_R) * H + h, mask=row_R < T, other=-1)
    is_placed_R = sel_R >= 0
    rank_R = tl.load(rank_ptr + bh.to(tl.int64) * T + row_R, mask=is_placed_R, other=0)
    base_R = tl.load(base_ptr + (bh.to(tl.int64) * n_tiles + row_R // TILE) * NC + sel_R, mask=is_placed_R, other=0)
    tl.store(order_ptr + bh.to(tl.int64) * T + base_R + rank_R, row_R, mask=is_placed_R)


@triton.jit
def block_of(ends_ptr, item, NC: tl.constexpr, NCP: tl.constexpr):
    """(chunk, place of `item` among the chunk's) where `ends` [NC] counts the items up to each chunk's last.

    The chunk is NC when there are fewer items. A vector load and a sum are used, because a search would wait for memory
    at each step.
    """
    n = tl.arange(0, NCP)
    ends_N = tl.load(ends_ptr + n, mask=n < NC, other=2147483647)
    is_before_N = ends_N <= item
    chunk = tl.sum(is_before_N.to(tl.int32), 0)
    begin = tl.max(tl.where(is_before_N, ends_N, 0), 0)
    return chunk, item - begin
