"""Tile sizes of the attention kernels by GPU, head dim, chunk and dtype.

Comments give the reasons for the sizes.
"""

from typing import NamedTuple

import jax.numpy as jnp

from kernels_pallas import device
from kernels_pallas.triton import interpreter
from kernels_pallas.triton.blocks import padded


class Tiles(NamedTuple):
    """Query rows `m` and keys `n` per step, warps, and stages.

    For `remote_bwd`, a segment has n blocks of m rows.
    """

    m: int
    n: int
    warps: int
    stages: int


def tiles(kernel: str, dim: int, chunk_size: int, dtype: jnp.dtype, *, several: bool = False) -> Tiles:
    """Return the sizes for `kernel`.

    Kernels are "remote", "local", "remote_bwd" and "local_bwd"; `several` means several chunks per query.
    """
    chunk = padded(chunk_size)
    if interpreter.is_chosen():  # small: tests then cover several tiles
        return Tiles(16, 2, 4, 1) if kernel == "remote_bwd" else Tiles(16, 16, 4, 1)
    half = jnp.dtype(dtype).itemsize == 2
    capability = device.compute_capability() or device.AMPERE
    wide = padded(dim) > 64 or not half  # a tile has twice the bytes of a (64, 16-bit) tile
    is_ampere = capability < device.HOPPER  # operands lie in registers: less fits with wide heads
    if kernel == "remote":
        if not half:
            return Tiles(32, min(chunk, 32), 4, 1)
        return Tiles(32 if is_ampere and wide else 64, min(chunk, 64 if wide else 128), 4, 1)
    if kernel == "local":
        return Tiles(32, 32, 4, 1) if not half else Tiles(min(max(chunk, 16), 64), min(chunk, 64), 4, 2)
    # dk and dv of the chunk, or of one piece, stay in registers
    keys = bwd_keys(dim, chunk_size, dtype)
    rows, warps = (32, 8 if half else 4) if wide else (64, 8 if keys > 64 else 4)
    if several and is_ampere:  # a local pass that also sums the rows of each query would spill with 64 rows
        rows = 32
    if kernel == "remote_bwd":  # rows are gathered: two small programs per multiprocessor are faster than a large one
        return Tiles(32, 16, 4, 2 if half and padded(dim) <= 64 else 1)
    assert kernel == "local_bwd", kernel
    return Tiles(min(rows, chunk), 1, warps, 1)


def bwd_keys(dim: int, chunk_size: int, dtype: jnp.dtype) -> int:
    """Return how many keys of a chunk a backward program holds, with their gradients.

    They take 64 registers per thread.
    """
    most = 32 if interpreter.is_chosen() else 128
    if jnp.dtype(dtype).itemsize > 2:
        most //= 4
    elif padded(dim) > 64:
        most //= 2
    return min(padded(chunk_size), max(16, most))
