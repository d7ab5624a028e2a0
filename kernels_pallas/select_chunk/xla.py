"""The `xla` backend of chunk selection: any device, O(T) memory.

Equations are in api.py.

    exact      a scan over the tiles of the causal half. Each tile is one product q k^T; its chunks' logsumexp is
               compared with the running best. Chunks are independent, so nothing is rescaled. T^2 K multiply-adds
               per head.
    best_key   the same with the chunks' largest scores instead of logsumexp; best_key_int8 rounds operands first
    approx     a scan over query tiles against the chunk means: 1/C as much work, fp32 means and product
    shortlist  as approx with another table; it gives m candidates per row. Rows are sorted by candidate
               (xla_sort_plan.py), so a block of rows reads a chunk's keys once; m T C K multiply-adds.
    random     the scan of approx with hashes instead of products; equal for every batch entry

With packed documents (documents.py), scores of keys that are not readable are -inf, tables cover readable keys, and a
row's candidates begin at the chunk of its document's first token.

All visit chunks in ascending order, and only a strictly greater score replaces the best, so ties go to the smallest
chunk. The k best chunks of a tile come from k rounds of argmax and are inserted into the k best so far, without a sort.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import xla_tiles
from kernels_pallas.backend import Backend
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.select_chunk import documents, int8, tables
from kernels_pallas.select_chunk.interface import ChunkSelection
from kernels_pallas.select_chunk.random_scores import random_scores
from kernels_pallas.select_chunk.tables import Shortlist
from kernels_pallas.xla_sort_plan import from_blocks, in_blocks, make_plan, scan_blocks, take


def load() -> ChunkSelection:
    """Return this module."""
    from kernels_pallas.select_chunk import xla

    return xla


BACKEND = Backend("xla", load)


class Packed(NamedTuple):
    """What packed documents change; the singleton axes are key-value heads."""

    first_B1M: Array  # int32, the first candidate of each row
    readable_B1cC: Array  # bool, per key; a partial last chunk is included


def select(
    q_BTHK: Array,
    k_BTGK: Array,
    *,
    chunk_size: int,
    selection: str,
    top_k: int = 1,
    shortlist: Shortlist | None = None,
    scale: float,
    segments_BT: Array | None = None,
) -> Array:
    """Return sel_BTH int32, the full past chunk that each query selects.

    The selection is -1 in the first chunk, and with segments where no past chunk ends in the query's document. With
    top_k above 1, return sel_BTHk: best chunk first, padded with -1.
    """
    T, H, G = q_BTHK.shape[1], q_BTHK.shape[2], k_BTGK.shape[2]
    k_most = min(top_k, (T - 1) // chunk_size)  # no query has more past chunks
    packed = None
    if segments_BT is not None:
        k_BTGK = documents.readable_keys(k_BTGK, segments_BT, chunk_size)
        first_BM = jnp.repeat(documents.starts(segments_BT) // chunk_size, H // G, axis=1)
        packed = Packed(first_BM[:, None], documents.readable(segments_BT, chunk_size)[:, None])
    if selection == "best_key_int8":
        q_BTHK, k_BTGK = int8.rounded(q_BTHK, k_BTGK, chunk_size)
    q_BGMK = xla_tiles.to_rows(q_BTHK, G)
    k_BGSK = k_BTGK.transpose(0, 2, 1, 3)
    if k_most == 0:
        sel_kBGM = []
    elif selection == "approx":
        sel_kBGM = _by_table(q_BGMK, k_BGSK, chunk_size, H // G, 1.0, "mean", k_most, packed)
    elif shortlist is not None and not shortlist.holds_all(T, chunk_size):
        sel_kBGM = _by_shortlist(q_BGMK, k_BGSK, chunk_size, H // G, scale, shortlist, k_most, packed)
    elif selection == "random":
        sel_kBGM = _random(q_BGMK.shape[:3], chunk_size, H // G, T // chunk_size, k_most, packed)
    else:
        of_chunk = jax.nn.logsumexp if selection == "exact" else jnp.max
        sel_kBGM = _by_every_key(q_BGMK, k_BGSK, chunk_size, H // G, scale, of_chunk, k_most, packed)
    none_BGM = jnp.full_like(q_BGMK[..., 0], -1, dtype=jnp.int32)
    sel_BGMk = jnp.stack([*sel_kBGM, *[none_BGM] * (top_k - k_most)], axis=-1)
    sel_BTHk = xla_tiles.from_rows(sel_BGMk, H)
    return sel_BTHk if top_k > 1 else sel_BTHk[..., 0]


def best_chunks(score: Array, top_k: int) -> Iterator[tuple[Array, Array]]:
    """Yield (largest score, its chunk) along the last axis, `top_k` times.

    Ties go to the smallest chunk.
    """
    for rank in range(top_k):
        chunk = jnp.argmax(score, axis=-1).astype(jnp.int32)
        yield score.max(-1), chunk
        if rank + 1 < top_k:
            score = jnp.where(jnp.arange(score.shape[-1]) == chunk[..., None], -jnp.inf, score)


def best_of_shortlist(chunk_m: Array, score_m: Array, top_k: int) -> list[Array]:
    """Return the best chunks among candidates in ascending order, one array per rank.

    A candidate of -1 comes first in this order and has the score -inf, so it ranks after all chunks.
    """
    best = best_chunks(score_m, top_k)
    return [jnp.take_along_axis(chunk_m, at[..., None], axis=-1)[..., 0] for _, at in best]


def _by_every_key(
    q_BGMK: Array,
    k_BGSK: Array,
    C: int,
    R: int,
    scale: float,
    of_chunk: Callable[..., Array],
    top_k: int,
    packed: Packed | None,
) -> list[Array]:
    """Select by `of_chunk`, which reduces key scores to a chunk score.

    It reduces the last axis, the scores of a chunk's keys.
    """
    B, G, M, _ = q_BGMK.shape
    T = M // R
    acc = accumulation_dtype(q_BGMK, k_BGSK)
    plan = xla_tiles.causal_tiles(T, C, B * G * R)
    rows, chunks = plan.side * R, plan.side // C
    q_BGMK = xla_tiles.pad_to(q_BGMK, plan.padded * R, axis=2)
    k_BGSK = xla_tiles.pad_to(k_BGSK, plan.padded, axis=2)
    if packed is not None:
        packed = Packed(
            xla_tiles.pad_to(packed.first_B1M, plan.padded * R, axis=2),
            xla_tiles.pad_to(packed.readable_B1cC, plan.padded // C, axis=2, value=True),
        )

    def visit(best_and_arg, tile):
        row, col = tile
        best_kBGM, arg_kBGM = best_and_arg
        q_BGmK = xla_tiles.block(q_BGMK, row, rows)
        k_BGsK = xla_tiles.block(k_BGSK, col, plan.side)
        s_BGms = scale * jnp.einsum("bgmk,bgsk->bgms", q_BGmK, k_BGsK, preferred_element_type=acc)
        s_BGmcC = s_BGms.reshape(B, G, rows, chunks, C)
        if packed is not None:
            readable_B1cC = xla_tiles.block(packed.readable_B1cC, col, chunks)
            s_BGmcC = jnp.where(readable_B1cC[:, :, None], s_BGmcC, -jnp.inf)
        score_BGmc = of_chunk(s_BGmcC, axis=-1)
        own_m = (row * plan.side + jnp.arange(rows) // R) // C
        chunk_c = col * chunks + jnp.arange(chunks)
        score_BGmc = jnp.where(chunk_c < own_m[:, None], score_BGmc, -jnp.inf)
        if packed is not None:
            first_B1m = xla_tiles.block(packed.first_B1M, row, rows)
            score_BGmc = jnp.where(chunk_c >= first_B1m[..., None], score_BGmc, -jnp.inf)
        best_kBGm = [xla_tiles.block(best_BGM, row, rows) for best_BGM in best_kBGM]
        arg_kBGm = [xla_tiles.block(arg_BGM, row, rows) for arg_BGM in arg_kBGM]
        for top_BGm, chunk_BGm in best_chunks(score_BGmc, min(top_k, chunks)):
            _insert(best_kBGm, arg_kBGm, top_BGm, col * chunks + chunk_BGm)
        best_kBGM = [xla_tiles.set_block(x, y, row, rows) for x, y in zip(best_kBGM, best_kBGm, strict=True)]
        arg_kBGM = [xla_tiles.set_block(x, y, row, rows) for x, y in zip(arg_kBGM, arg_kBGm, strict=True)]
        return (best_kBGM, arg_kBGM), None

    init = (
        [jnp.full_like(q_BGMK[..., 0], -jnp.inf, dtype=acc)] * top_k,
        [jnp.full_like(q_BGMK[..., 0], -1, dtype=jnp.int32)] * top_k,
    )
    (_, arg_kBGM), _ = jax.lax.scan(visit, init, (plan.rows, plan.cols))
    return [arg_BGM[:, :, :M] for arg_BGM in arg_kBGM]


def _insert(best: list[Array], arg: list[Array], new: Array, new_arg: Array) -> None:
    """Insert a score and its chunk into lists in descending order.

    It goes after all equal scores; the last entry is dropped.
    """
    is_better = [new > old for old in best]
    for rank in reversed(range(len(best))):
        entry, entry_arg = new, new_arg
        if rank:  # the new score may belong to a better rank
            entry = jnp.minimum(new, best[rank - 1])
            entry_arg = jnp.where(is_better[rank - 1], arg[rank - 1], new_arg)
        arg[rank] = jnp.where(is_better[rank], entry_arg, arg[rank])
        best[rank] = jnp.maximum(entry, best[rank])


def _by_table(
    q_BGMK: Array, k_BGSK: Array, C: int, R: int, scale: float, table: str, top_k: int, packed: Packed | None
) -> list[Array]:
    (B, G, M, K), n_full = q_BGMK.shape, k_BGSK.shape[2] // C
    readable_B1cC = None if packed is None else packed.readable_B1cC[:, :, :n_full]
    row_BGcPK = tables.rows(k_BGSK[:, :, : n_full * C].reshape(B, G, n_full, C, K), table, readable_B1cC)
    row_BGrK = row_BGcPK.reshape(B, G, -1, K)
    steps, rows = xla_tiles.segments(M, B * G * max(row_BGrK.shape[2], K))
    q_BGMK = xla_tiles.pad_to(q_BGMK, steps * rows, axis=2)

    def score(step: Array) -> Array:
        q_BGmK = xla_tiles.block(q_BGMK, step, rows).astype(row_BGrK.dtype)
        # full precision: these products are few compared with the exact work, and near ties decide which keys are read
        x_BGmr = scale * jnp.einsum("bgmk,bgrk->bgmr", q_BGmK, row_BGrK, precision="highest")
        return tables.score(x_BGmr.reshape(B, G, rows, n_full, -1), table)

    return [sel_BGM[:, :, :M] for sel_BGM in _by_chunk(score, steps, rows, R * C, top_k, packed)]


def _by_shortlist(
    q_BGMK: Array,
    k_BGSK: Array,
    C: int,
    R: int,
    scale: float,
    shortlist: Shortlist,
    top_k: int,
    packed: Packed | None,
) -> list[Array]:
    """Select by the best key among the chunks with the largest table scores."""
    listed = _by_table(q_BGMK, k_BGSK, C, R, scale, shortlist.table, shortlist.size, packed)
    chunk_BGMm = jnp.sort(jnp.stack(listed, axis=-1), axis=-1)
    k_BGcCK, acc = in_blocks(k_BGSK, C), accumulation_dtype(q_BGMK, k_BGSK)
    plan = make_plan(chunk_BGMm, k_BGcCK.shape[2], C, R)
    assert plan is not None  # the caller ensures that some query has more past chunks than the list

    def visit(carry, row_BGnr, chunk_BGn):
        q_BGnrK, k_BGnCK = take(q_BGMK, row_BGnr), take(k_BGcCK, chunk_BGn)
        s_BGnrC = scale * jnp.einsum("bgnrk,bgnsk->bgnrs", q_BGnrK, k_BGnCK, preferred_element_type=acc)
        if packed is not None:
            readable_BGcC = jnp.broadcast_to(packed.readable_B1cC, k_BGcCK.shape[:4])
            s_BGnrC = jnp.where(take(readable_BGcC, chunk_BGn)[:, :, :, None], s_BGnrC, -jnp.inf)
        return carry, s_BGnrC.max(-1)

    _, best_BGnr = scan_blocks(visit, None, C, plan.row_BGnr, plan.chunk_BGn)
    best_BGMm = take(from_blocks(best_BGnr), plan.slot_BGMk, fill=-jnp.inf)
    return best_of_shortlist(chunk_BGMm, best_BGMm, top_k)


def _random(size: tuple[int, ...], C: int, R: int, n_full: int, top_k: int, packed: Packed | None) -> list[Array]:
    B, G, M = size
    steps, rows = xla_tiles.segments(M, G * n_full)

    def score(step: Array) -> Array:
        m_m1 = (step * rows + jnp.arange(rows))[:, None]
        head_Gm1 = R * jnp.arange(G)[:, None, None] + m_m1 % R
        return random_scores(m_m1 // R, head_Gm1, jnp.arange(n_full))[None]

    ranks = _by_chunk(score, steps, rows, R * C, top_k, packed)
    return [jnp.broadcast_to(sel_1GM[:, :, :M], (B, G, M)) for sel_1GM in ranks]


def _by_chunk(
    score: Callable[[Array], Array], steps: int, rows: int, rows_per_chunk: int, top_k: int, packed: Packed | None
) -> list[Array]:
    """Select by `score(step)`, the scores of `rows` rows and all full chunks.

    Returns [B, G, steps * rows] for each rank.
    """

    def visit(_, step):
        score_BGmc = score(step)
        own_m = (step * rows + jnp.arange(rows)) // rows_per_chunk
        is_past_mc = jnp.arange(score_BGmc.shape[-1]) < own_m[:, None]
        n_candidates_m = own_m
        if packed is not None:
            first_B1m = xla_tiles.block(xla_tiles.pad_to(packed.first_B1M, steps * rows, axis=2), step, rows)
            is_past_mc = is_past_mc & (jnp.arange(score_BGmc.shape[-1]) >= first_B1m[..., None])
            n_candidates_m = own_m - first_B1m
        best = best_chunks(jnp.where(is_past_mc, score_BGmc, -jnp.inf), top_k)
        return None, [jnp.where(n_candidates_m <= rank, -1, chunk_BGm) for rank, (_, chunk_BGm) in enumerate(best)]

    _, sel_ksBGm = jax.lax.scan(visit, None, jnp.arange(steps))
    return [jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], steps * rows) for x in sel_ksBGm]
