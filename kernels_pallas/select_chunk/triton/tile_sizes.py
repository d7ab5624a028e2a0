"""Tile sizes of the selection kernels by GPU, head dim, chunk and dtype.

Comments give the reasons for the sizes.
"""

from typing import NamedTuple

import jax.numpy as jnp

from kernels_pallas import device
from kernels_pallas.triton import interpreter
from kernels_pallas.triton.blocks import padded


class Tiles(NamedTuple):
    """Query rows `m` and keys (or table rows) `n` per step, warps, stages, `poly`.

    For bounded scores, `poly` of every 4 exponentials run on the multiply-add units.
    """

    m: int
    n: int
    warps: int
    stages: int
    poly: int = 0


def tiles(kernel: str, dim: int, chunk_size: int, dtype: jnp.dtype) -> Tiles:
    """Return the sizes for `kernel`: "exact", "best_key", "table" or "listed"."""
    chunk = padded(chunk_size)
    if interpreter.is_chosen():  # small: tests then cover several tiles
        return Tiles(32, 16, 4, 1) if kernel in ("exact", "best_key") else Tiles(16, 16, 4, 1)
    half = jnp.dtype(dtype).itemsize <= 2
    capability = device.compute_capability() or device.AMPERE
    wide = padded(dim) > 64 or not half  # a tile has twice the bytes of a (64, 16-bit) tile
    is_ampere = capability < device.HOPPER  # operands lie in registers: less fits with wide heads
    if kernel == "table":
        return Tiles(64, 32, 4, 2) if wide else Tiles(128, 64, 8, 2)
    if kernel == "listed" and half:  # rows are gathered: small programs; no other sizes were tried
        return Tiles(64, min(chunk, 128), 4, 3)
    # best_key has the products of exact without its exponentials, and in 8 bits half the bytes; no other sizes were
    # tried.
    assert kernel in ("exact", "best_key", "listed"), kernel
    # a larger query tile reads keys from the L2 cache less often
    if not half:
        return Tiles(32, min(chunk, 32), 4, 1) if is_ampere and padded(dim) > 64 else Tiles(64, min(chunk, 32), 4, 2)
    if not is_ampere:
        return Tiles(128, min(chunk, 64 if wide else 128), 8, 3, 1)
    return Tiles(128, min(chunk, 64), 8, 2, 1)
