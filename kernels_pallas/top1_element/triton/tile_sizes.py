"""Tile sizes of the Top-1 Element kernels by GPU, head dim and dtype.

Comments give the reasons for the sizes.
"""

from typing import NamedTuple

import jax.numpy as jnp

from kernels_pallas import device
from kernels_pallas.triton import interpreter


class Tiles(NamedTuple):
    """Queries and keys per step, warps, and stages.

    The outer size (queries; keys for dk and dkv) is a multiple of the inner size.
    """

    m: int
    n: int
    warps: int
    stages: int


# By kernel, largest padded dim, 16-bit or not, Hopper or not. Chosen from the registers and shared memory that the
# compiler reports (python -m tests.kernels.compile_triton). Criteria, in this order: no spills, most warps on a
# multiprocessor, largest outer tile (it determines how often keys are read again).
#   16-bit, sm80   mma.sync: operands pass through registers. With 4 warps and 128 x 32..64 two programs fit. At dim 128
#                  the output tile takes half the registers of 4 warps: use 8 warps or smaller tiles.
#   16-bit, sm90   wgmma reads the right operand from shared memory: 64 rows per warpgroup, two programs of two
#                  warpgroups. dk holds k, v and two score tiles: 32 queries at a time.
#   fp32           three TF32 products per tile, with operands split in registers: small tiles
# evaluate uses `n` of forward: it is the size of the tile in which the best key is searched first.
SMALL = Tiles(32, 16, 4, 1)  # for the interpreter: tests cover several tiles at T = 50
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
    """Return the table entry for this GPU, or the interpreter's."""
    if interpreter.is_chosen():
        return Tiles(SMALL.n, SMALL.m, 4, 1) if kernel in ("dk", "dkv") else SMALL
    capability = device.compute_capability() or device.AMPERE
    kind = (64 if dim <= 64 else 128, jnp.dtype(dtype).itemsize == 2)
    return TILES.get((kernel, *kind, capability >= device.HOPPER)) or TILES[(kernel, *kind, False)]
