"""Tile sizes of the Top-1 Chunk kernels by GPU, head dim, chunk and dtype, and what decides them."""

from typing import NamedTuple

import jax.numpy as jnp

from kernels_pallas import compat
from kernels_pallas.triton_probe import padded


class Tiles(NamedTuple):
    """Rows of queries `m` and keys `n` per step (`remote_grad`: blocks of m rows per segment), warps, stages.

    `poly` of every 4 exponentials of bounded scores are made on the multiply-add units.
    """

    m: int
    n: int
    warps: int
    stages: int
    poly: int = 0


def tiles(kernel: str, dim: int, chunk_size: int, dtype: jnp.dtype) -> Tiles:
    """The sizes for `kernel`, of "exact", "approx", "fused", "remote", "local", "remote_grad", "local_grad"."""
    chunk = padded(chunk_size)
    if compat.is_interpreted():  # small, so that tests see several tiles
        return {"exact": Tiles(32, 16, 4, 1), "remote_grad": Tiles(16, 2, 4, 1)}.get(kernel, Tiles(16, 16, 4, 1))
    half = jnp.dtype(dtype).itemsize == 2
    capability = compat.compute_capability() or compat.OLDEST
    wide = padded(dim) > 64 or not half  # as many bytes per tile as two of (64, 16-bit)
    is_ampere = capability < 90  # which has the operands of products in registers, so of wide heads less fits
    if kernel == "exact":
        # the larger the query tile, the less often keys are read from the L2 cache
        if not half:
            return (
                Tiles(32, min(chunk, 32), 4, 1) if is_ampere and padded(dim) > 64 else Tiles(64, min(chunk, 32), 4, 2)
            )
        if not is_ampere:
            return Tiles(128, min(chunk, 64 if wide else 128), 8, 3, 1)
        return Tiles(128, min(chunk, 64), 8, 2, 1)
    if kernel == "approx":
        return Tiles(64, 32, 4, 2) if wide else Tiles(128, 64, 8, 2)
    if kernel == "fused":  # 128 rows and 8 warps were slower, and spill on an A100
        if not half:
            return Tiles(32, min(chunk, 32), 4, 1)
        if wide:
            return Tiles(32, min(chunk, 32), 4, 1) if chunk <= 128 else Tiles(16, 32, 8, 1)
        return Tiles(32 if is_ampere and chunk > 128 else 64, min(chunk, 64), 4, 2)
    if kernel == "remote":
        if not half:
            return Tiles(32, min(chunk, 32), 4, 1)
        return Tiles(32 if is_ampere and wide else 64, min(chunk, 64 if wide else 128), 4, 1)
    if kernel == "local":
        return Tiles(32, 32, 4, 1) if not half else Tiles(min(max(chunk, 16), 64), min(chunk, 64), 4, 2)
    # dk and dv of the chunk, or of a piece of it, stay in registers
    keys = grad_keys(dim, chunk_size, dtype)
    rows, warps = (32, 8 if half else 4) if wide else (64, 8 if keys > 64 else 4)
    if kernel == "remote_grad":  # rows are gathered, so two small programs per multiprocessor beat a large one
        return Tiles(32, 16, 4, 2 if half and padded(dim) <= 64 else 1)
    assert kernel == "local_grad", kernel
    return Tiles(min(rows, chunk), 1, warps, 1)


def grad_keys(dim: int, chunk_size: int, dtype: jnp.dtype) -> int:
    """How many keys of a chunk a program of the backward pass holds, with their gradients: 64 registers a thread."""
    most = 32 if compat.is_interpreted() else 128
    if jnp.dtype(dtype).itemsize > 2:
        most //= 4
    elif padded(dim) > 64:
        most //= 2
    return min(padded(chunk_size), max(16, most))
