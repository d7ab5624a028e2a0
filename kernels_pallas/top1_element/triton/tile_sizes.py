"""Tile sizes of the Top-1 Element kernels by GPU, head dim and dtype, and what decides them."""

from typing import NamedTuple

import jax.numpy as jnp

from kernels_pallas import device
from kernels_pallas.triton import interpreter


class Tiles(NamedTuple):
    """Queries and keys per step. The outer one (queries, but keys for dk and dkv) is a multiple of the inner one."""

    m: int
    n: int
    warps: int
    stages: int


# By kernel, largest padded dim, 16-bit or not, and whether from Hopper on. Chosen by registers and shared memory as the
# compiler reports them (python -m tests.kernels.compile_triton). The criteria are no spills, then the most warps on a
# multiprocessor, then the largest outer tile, which determines how often keys are read again.
#   16-bit, sm80   mma.sync: operands pass through registers, 4 warps of 128 x 32..64 fit two programs; at
#                  dim 128 the output tile alone is half of the registers of 4 warps, so 8 warps or smaller tiles
#   16-bit, sm90   wgmma reads the right operand from shared memory: 64 rows per warpgroup, two programs of two each; of
#                  dk, which holds k, v and two score tiles, 32 queries at a time
#   fp32           three TF32 products per tile, each with its operands split in registers: small tiles
# `n` of forward serves evaluate too: it is the unit in which the best key is found first.
SMALL = Tiles(32, 16, 4, 1)  # the interpreter's: tests see several tiles at T = 50
TILES = {
    # (kernel, dim, 16-bit, sm90)
    ("forward", 64, True, False): Tiles(128, 64, 4, 3),
    ("forward", 128, True, False): Tiles(128, 64, 8, 3),
    ("forward", 64, True, True): Tiles(128, 64, 8, 3),
    ("forward", 128, True, True): Tiles(128, 64, 8, 3),
    ("forward", 64, False, False): Tiles(64, 16, 4, 2),
    ("forward", 128, False, False): Tiles(32, 32, 8, 2),
    ("dq", 64, True, False): Tiles(128, 32, 4, 3),
    ("dq", 128, True, False): Tiles(64, 64, 4, 2),
    ("dq", 64, True, True): Tiles(128, 64, 8, 3),
    ("dq", 128, True, True): Tiles(128, 32, 8, 2),
    ("dq", 64, False, False): Tiles(32, 32, 4, 2),
    ("dq", 128, False, False): Tiles(32, 16, 8, 2),
    ("dk", 64, True, False): Tiles(32, 128, 4, 3),
    ("dk", 128, True, False): Tiles(32, 64, 4, 2),
    ("dk", 64, True, True): Tiles(32, 128, 8, 3),
    ("dk", 128, True, True): Tiles(64, 64, 4, 2),
    ("dk", 64, False, False): Tiles(32, 32, 4, 2),
    ("dk", 128, False, False): Tiles(16, 16, 4, 2),
    ("dkv", 64, True, False): Tiles(32, 64, 4, 3),
    ("dkv", 128, True, False): Tiles(32, 64, 8, 2),
    ("dkv", 64, True, True): Tiles(32, 128, 8, 3),
    ("dkv", 128, True, True): Tiles(32, 64, 8, 2),
    ("dkv", 64, False, False): Tiles(32, 32, 4, 2),
    ("dkv", 128, False, False): Tiles(16, 16, 4, 2),
}


def tiles(kernel: str, dim: int, dtype: jnp.dtype) -> Tiles:
    """Return the table's entry for the GPU at hand, or the interpreter's."""
    if interpreter.is_chosen():
        return Tiles(SMALL.n, SMALL.m, 4, 1) if kernel in ("dk", "dkv") else SMALL
    capability = device.compute_capability() or device.AMPERE
    kind = (64 if dim <= 64 else 128, jnp.dtype(dtype).itemsize == 2)
    return TILES.get((kernel, *kind, capability >= device.HOPPER)) or TILES[(kernel, *kind, False)]
