"""The `xla` backend of chunk selection: any device, O(T) memory (equations in api.py).

exact     a scan over the tiles of the causal half. Each tile is one product q k^T; its chunks' logsumexp are
          compared with the running best. Chunks are independent, so nothing is rescaled. T^2 K multiply-adds
          per head.
best_key  the same with the chunks' largest scores in place of logsumexp.
approx    a scan over query tiles against the table of chunk means, 1/C of that work. fp32 means, fp32 product.

All visit chunks in ascending order and replace on strictly greater, so ties go to the smallest chunk.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import xla_tiles
from kernels_pallas.backend import Backend
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.select_chunk.interface import ChunkSelection


def load() -> ChunkSelection:
    """Return this module."""
    from kernels_pallas.select_chunk import xla

    return xla


BACKEND = Backend("xla", load)


def select(q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, selection: str, scale: float) -> Array:
    """Return sel_BTH int32: the full past chunk that each query selects, -1 in the first chunk."""
    T, H, G = q_BTHK.shape[1], q_BTHK.shape[2], k_BTGK.shape[2]
    q_BGMK = xla_tiles.to_rows(q_BTHK, G)
    k_BGSK = k_BTGK.transpose(0, 2, 1, 3)
    if chunk_size >= T:  # no query has a full chunk before it
        sel_BGM = jnp.full_like(q_BGMK[..., 0], -1, dtype=jnp.int32)
    elif selection == "approx":
        sel_BGM = _approx(q_BGMK, k_BGSK, chunk_size, H // G)
    else:
        of_chunk = jax.nn.logsumexp if selection == "exact" else jnp.max
        sel_BGM = _by_every_key(q_BGMK, k_BGSK, chunk_size, H // G, scale, of_chunk)
    return xla_tiles.scalar_from_rows(sel_BGM, H)


def _chunk_means(k_BGSK: Array, chunk_size: int) -> Array:
    """Return the mean key of every full chunk, [B, G, S, K] -> [B, G, S // C, K], fp32 at least."""
    B, G, S, K = k_BGSK.shape
    n_full = S // chunk_size
    k_BGcCK = k_BGSK[:, :, : n_full * chunk_size].reshape(B, G, n_full, chunk_size, K)
    return k_BGcCK.astype(accumulation_dtype(k_BGSK)).mean(3)


def _by_every_key(q_BGMK: Array, k_BGSK: Array, C: int, R: int, scale: float, of_chunk: Callable[..., Array]) -> Array:
    """Select by `of_chunk`, which reduces the scores of a chunk's keys, the last axis, to that of the chunk."""
    B, G, M, _ = q_BGMK.shape
    T = M // R
    acc = accumulation_dtype(q_BGMK, k_BGSK)
    plan = xla_tiles.causal_tiles(T, C, B * G * R)
    rows, chunks = plan.side * R, plan.side // C
    q_BGMK = xla_tiles.pad_to(q_BGMK, plan.padded * R, axis=2)
    k_BGSK = xla_tiles.pad_to(k_BGSK, plan.padded, axis=2)

    def visit(best_and_arg, tile):
        row, col = tile
        best_BGM, arg_BGM = best_and_arg
        q_BGmK = xla_tiles.block(q_BGMK, row, rows)
        k_BGsK = xla_tiles.block(k_BGSK, col, plan.side)
        s_BGms = scale * jnp.einsum("bgmk,bgsk->bgms", q_BGmK, k_BGsK, preferred_element_type=acc)
        score_BGmc = of_chunk(s_BGms.reshape(B, G, rows, chunks, C), axis=-1)
        own_m = (row * plan.side + jnp.arange(rows) // R) // C
        chunk_c = col * chunks + jnp.arange(chunks)
        score_BGmc = jnp.where(chunk_c < own_m[:, None], score_BGmc, -jnp.inf)
        top_BGm = score_BGmc.max(-1)
        top_chunk_BGm = col * chunks + jnp.argmax(score_BGmc, axis=-1).astype(jnp.int32)
        old_BGm = xla_tiles.block(best_BGM, row, rows)
        is_better = top_BGm > old_BGm
        arg_BGm = jnp.where(is_better, top_chunk_BGm, xla_tiles.block(arg_BGM, row, rows))
        best_BGM = xla_tiles.set_block(best_BGM, jnp.maximum(top_BGm, old_BGm), row, rows)
        return (best_BGM, xla_tiles.set_block(arg_BGM, arg_BGm, row, rows)), None

    init = (
        jnp.full_like(q_BGMK[..., 0], -jnp.inf, dtype=acc),
        jnp.full_like(q_BGMK[..., 0], -1, dtype=jnp.int32),
    )
    (_, arg_BGM), _ = jax.lax.scan(visit, init, (plan.rows, plan.cols))
    return arg_BGM[:, :, :M]


def _approx(q_BGMK: Array, k_BGSK: Array, C: int, R: int) -> Array:
    B, G, M, K = q_BGMK.shape
    mean_BGcK = _chunk_means(k_BGSK, C)
    n_full = mean_BGcK.shape[2]
    steps, rows = xla_tiles.segments(M, B * G * max(n_full, K))
    q_BGMK = xla_tiles.pad_to(q_BGMK, steps * rows, axis=2)

    def visit(_, step):
        q_BGmK = xla_tiles.block(q_BGMK, step, rows).astype(mean_BGcK.dtype)
        # full precision: 1/C of the exact work, and a near tie decides which keys are read
        score_BGmc = jnp.einsum("bgmk,bgck->bgmc", q_BGmK, mean_BGcK, precision="highest")
        own_m = (step * rows + jnp.arange(rows)) // (R * C)
        is_past_mc = jnp.arange(n_full) < own_m[:, None]
        arg_BGm = jnp.argmax(jnp.where(is_past_mc, score_BGmc, -jnp.inf), axis=-1).astype(jnp.int32)
        return None, jnp.where(own_m == 0, -1, arg_BGm)

    _, sel_sBGm = jax.lax.scan(visit, None, jnp.arange(steps))
    return jnp.moveaxis(sel_sBGm, 0, 2).reshape(B, G, steps * rows)[:, :, :M]
