"""Launch the Hopper kernel of chunk selection (kernel.py).

For exact, the Cauchy-Schwarz inequality bounds |x| for the call, from the largest norms of q and k. If the bound is
small enough, chunks are compared by sums of 2^x, otherwise by log-sum-exp. These are two kernels, selected by
`lax.cond`. best_key is one kernel.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import device
from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.numerics import LOG2_E, score_bound, with_sign
from kernels_pallas.select_chunk.mosaic_gpu import kernel
from kernels_pallas.select_chunk.mosaic_gpu.masses import Sizes
from kernels_pallas.select_chunk.tables import Shortlist

BOUND = 60.0  # a chunk's sum of 2^60 stays far below float32's maximum, and the polynomial needs no exponent clamp


class Tiles(NamedTuple):
    """Sizes of a program, for tuning; see `masses.Sizes`.

    Larger tiles read keys from the L2 cache less often.
    """

    rows: int = 64
    groups: int = 4
    stages: int = 4
    poly: int = 2


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

    The selection is -1 in the first chunk.
    """
    assert segments_BT is None
    assert (top_k, shortlist) == (1, None), (top_k, shortlist)
    if chunk_size >= q_BTHK.shape[1]:  # no query has a full past chunk
        return jnp.full(q_BTHK.shape[:3], -1, jnp.int32)
    f = partial({"exact": exact, "best_key": best_key}[selection], chunk_size=chunk_size, scale=scale)
    return fold_vmap(f, "b t (g r) k, b t g k -> b t (g r)", **heads(q_BTHK, k_BTGK))(q_BTHK, k_BTGK)


# Layers of equal sizes share compiled kernels. Otherwise each layer's are compiled again, for seconds.
_shared = partial(jax.jit, static_argnames=("chunk_size", "scale", "tile", "interpret"))


@_shared
def exact(
    q_BTHK: Array,
    k_BTGK: Array,
    *,
    chunk_size: int,
    scale: float,
    tile: Tiles = Tiles(),  # noqa: B008 - immutable
    interpret: bool | None = None,
) -> Array:
    """Select by softmax mass.

    `tile` is for tuning. `interpret` allows compiling without a GPU.
    """
    n, run, operands = _prepared(q_BTHK, k_BTGK, chunk_size, tile, interpret)
    n = n._replace(log2_scale=scale * LOG2_E)
    is_bounded = jnp.max(score_bound(q_BTHK, k_BTGK)) * abs(scale) * LOG2_E <= BOUND
    sel_BHT = lax.cond(is_bounded, run(n), run(n._replace(rule="logsumexp")), *operands)
    return jnp.swapaxes(sel_BHT[:, :, : q_BTHK.shape[1]], 1, 2)


@_shared
def best_key(
    q_BTHK: Array,
    k_BTGK: Array,
    *,
    chunk_size: int,
    scale: float,
    tile: Tiles = Tiles(),  # noqa: B008 - immutable
    interpret: bool | None = None,
) -> Array:
    """Select by the largest score, of which only the scale's sign matters.

    `tile` and `interpret` are as for `exact`.
    """
    n, run, operands = _prepared(with_sign(q_BTHK, scale), k_BTGK, chunk_size, tile, interpret)
    sel_BHT = run(n._replace(rule="best_key"))(*operands)
    return jnp.swapaxes(sel_BHT[:, :, : q_BTHK.shape[1]], 1, 2)


def _prepared(
    q_BTHK: Array, k_BTGK: Array, chunk_size: int, tile: Tiles, interpret: bool | None
) -> tuple[Sizes, Callable[[Sizes], Callable[[Array, Array], Array]], tuple[Array, Array]]:
    """Return sizes, the kernel as a function of sizes, and its operands.

    The sizes are for rule "mass" with a scale of 1. The kernel returns sel [B, H, T'].
    """
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    if chunk_size % tile.rows:
        raise ValueError(f"{tile} does not fit chunks of {chunk_size}: the rows must divide them")
    interpret = device.platform() == "cpu" if interpret is None else interpret
    per_tile = tile.rows * tile.groups
    n_tiles = -(-T // per_tile)
    n = Sizes(
        H=H,
        R=H // G,
        K=K,
        C=chunk_size,
        tiles=n_tiles,
        full=(T - 1) // chunk_size,
        dtype=q_BTHK.dtype,
        log2_scale=1.0,
        rule="mass",
        block=128 if chunk_size % 128 == 0 else 64,
        rows=tile.rows,
        groups=tile.groups,
        stages=tile.stages,
        poly=0 if interpret else tile.poly,  # on a CPU, XLA simplifies (x + a) - a to x and cancels the rounding
    )

    run = partial(kernel.call, B=B, T=n_tiles * per_tile, interpret=interpret)
    padded_BTHK = jnp.pad(q_BTHK, ((0, 0), (0, n_tiles * per_tile - T), (0, 0), (0, 0)))
    if T % 8:  # copies tile the sequence by 8
        k_BTGK = k_BTGK[:, : n.full * chunk_size]
    return n, run, (padded_BTHK, k_BTGK)
