"""Triton kernels that sort rows by the chunk that they selected: a counting sort.

    kernel         one program per                 reads            writes
    rank_kernel    batch entry, head, TILE rows    sel              rank, count
    place_kernel   batch entry, head, BLOCK rows   sel, rank, base  order

    operand  shape              dtype
    sel      [B, T, H]          int32  the selected chunk, or -1
    rank     [B, H, T]          int32  earlier rows in the tile that selected the same chunk
    count    [B, H, tiles, NC]  int32  the tile's rows that selected each chunk
    base     [B, H, tiles, NC]  int32  place of the tile's first row for each chunk: running sums of count
    order    [B, H, T]          int32  the sorted rows: order[base[tile, sel] + rank] = row

XLA computes base from count between the two kernels, because these arrays are small (sort_plan.py). The sort is stable
and uses no atomics: two runs give the same order, and an earlier row's place never depends on a later row.
"""

import triton
import triton.language as tl


@triton.jit
def rank_kernel(
    sel_ptr, rank_ptr, count_ptr,
    T: tl.constexpr, H: tl.constexpr, NC: tl.constexpr, TILE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Write rank [B, H, T] and count [B, H, tiles, NC] from sel [B, T, H].

    Rows with sel = -1 are not counted.
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
    tl.debug_barrier()  # other threads overwrite these zeros with counts
    # the last row of a chunk in this tile writes the chunk's count
    tl.store(count_ptr + sel_R, total_R, mask=(rank_R == total_R - 1) & (sel_R >= 0))


@triton.jit
def place_kernel(
    sel_ptr, rank_ptr, base_ptr, order_ptr,
    T: tl.constexpr, H: tl.constexpr, NC: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write order [B, H, T] from sel, rank and base.

    Entries after the last placed row stay unwritten.
    """
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
    """Return the chunk of `item` and the item's number within the chunk.

    `ends` [NC] counts the items in chunks 0 to c. The chunk is NC if there are fewer items. This loads the whole vector
    and sums, because a search would wait for memory in each step.
    """
    n = tl.arange(0, NCP)
    ends_N = tl.load(ends_ptr + n, mask=n < NC, other=2147483647)
    is_before_N = ends_N <= item
    chunk = tl.sum(is_before_N.to(tl.int32), 0)
    begin = tl.max(tl.where(is_before_N, ends_N, 0), 0)
    return chunk, item - begin
