"""Row layout and tile schedules that the xla attention backends share.

Layout: queries become `q_BGMK` with G key-value heads and M = T * R rows per key-value head, where R = H / G query
heads share it. Row m is query position m // R. Every product is then a plain matrix product of rows and keys `k_BGSK`,
grouped-query attention costs nothing extra, and earlier positions come first.

Schedule: `causal_tiles` cuts the T x T score matrix into square tiles and lists the tiles on or below the diagonal. A
`lax.scan` over the list does the causal half of the work with static shapes. It has no dynamic trip count, for which a
GPU would wait for the host. Only one tile of scores exists at a time, so memory is O(T).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import device

# Scores that exist at one time. Accelerators need few large matrix products; on a CPU the tile should fit the cache.
TILE_ELEMENTS = {"cpu": 2**18}
TILE_ELEMENTS_DEFAULT = 2**27


def tile_elements() -> int:
    """Return how many scores one step of a schedule may hold on the current platform."""
    return TILE_ELEMENTS.get(device.platform(), TILE_ELEMENTS_DEFAULT)


class CausalTiles(NamedTuple):
    """A square tiling of the causal half: tiles (rows[p], cols[p]).

    Columns ascend within a row.
    """

    side: int  # positions per tile, a multiple of the unit
    padded: int  # length after padding: side * number of tiles
    rows: np.ndarray
    cols: np.ndarray


def causal_tiles(length: int, unit: int, matrices: int, *, window: int = 0) -> CausalTiles:
    """Return tiles for `matrices` score matrices of `length` x `length`.

    Sides are multiples of `unit`. With a `window`, the list omits tiles in which every key is at least `window`
    positions before every query. Sides are then not much longer than the window, so the number of scores is linear in
    `length`.
    """
    n_units = -(-length // unit)
    most = max(1, int(math.sqrt(tile_elements() / max(1, matrices))) // unit)
    if window:
        most = min(most, -(-window // unit))
    n_tiles = -(-n_units // most)
    side = -(-n_units // n_tiles) * unit
    n_tiles = -(-length // side)
    row_P, col_P = np.tril_indices(n_tiles)
    if window:
        is_near_P = (row_P - col_P) * side - (side - 1) < window
        row_P, col_P = row_P[is_near_P], col_P[is_near_P]
    return CausalTiles(side, side * n_tiles, row_P.astype(np.int32), col_P.astype(np.int32))


def segments(count: int, elements_each: int) -> tuple[int, int]:
    """Return (steps, items per step) to cover `count` items.

    A step has `tile_elements()` scores; the last step is padded.
    """
    most = max(1, tile_elements() // max(1, elements_each))
    steps = -(-count // most)
    return steps, -(-count // steps)


def to_rows(x_BTHK: jax.Array, groups: int) -> jax.Array:
    """Rearrange [B, T, H, K] to [B, G, T * R, K]."""
    B, T, H, K = x_BTHK.shape
    x_BTGRK = x_BTHK.reshape(B, T, groups, H // groups, K)
    return x_BTGRK.transpose(0, 2, 1, 3, 4).reshape(B, groups, T * (H // groups), K)


def from_rows(x_BGMK: jax.Array, heads: int) -> jax.Array:
    """Rearrange [B, G, T * R, K] to [B, T, H, K]."""
    B, G, M, K = x_BGMK.shape
    R = heads // G
    return x_BGMK.reshape(B, G, M // R, R, K).transpose(0, 2, 1, 3, 4).reshape(B, M // R, heads, K)


def scalar_to_rows(x_BTH: jax.Array, groups: int) -> jax.Array:
    """Rearrange [B, T, H] to [B, G, T * R]."""
    return to_rows(x_BTH[..., None], groups)[..., 0]


def scalar_from_rows(x_BGM: jax.Array, heads: int) -> jax.Array:
    """Rearrange [B, G, T * R] to [B, T, H]."""
    return from_rows(x_BGM[..., None], heads)[..., 0]


def pad_to(x: jax.Array, size: int, *, axis: int, value: float = 0) -> jax.Array:
    """Pad one axis at its end up to `size`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return x if x.shape[axis] == size else jnp.pad(x, widths, constant_values=value)


def block(x: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """Return block `index` of `size` entries along axis 2."""
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=2)


def set_block(x: jax.Array, update: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """Return the array with block `index` of `size` entries along axis 2 replaced."""
    return jax.lax.dynamic_update_slice_in_dim(x, update.astype(x.dtype), index * size, axis=2)


def add_block(x: jax.Array, update: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """Return the array with `update` added to block `index` along axis 2."""
    return set_block(x, block(x, index, size) + update.astype(x.dtype), index, size)
