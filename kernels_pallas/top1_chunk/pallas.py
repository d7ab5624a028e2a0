"""The `pallas` backend of chunk selection: exact, on Hopper, by the kernel in pallas_select_kernels.py.

Sums of 2^x are compared directly where Cauchy and Schwarz bound every |x| of the call (largest norms of q and k, found
beforehand), else log-sum-exps: two kernels, and `lax.cond` between them.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import dispatch
from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.top1_chunk import pallas_select_kernels as kernels
from kernels_pallas.top1_chunk.pallas_select_loops import LOG2_E, Sizes

BOUND = 60.0  # 2^60 and a chunk of them stay far inside float32, and the polynomial's exponent needs no clamp


class Tiles(NamedTuple):
    """Sizes of a program, for tuning; see `pallas_select_loops.Sizes`."""

    rows: int = 64
    groups: int = 4
    stages: int = 4
    poly: int = 2
    style: str = "plain"
    registers: tuple[int, int] | None = None
    semantics: str = "lane"


def tiles(K: int, chunk_size: int) -> Tiles:
    """The larger a program's tile of queries, the less often keys are read from the L2 cache."""
    del K, chunk_size
    return Tiles()


def select(q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, selection: str, scale: float) -> Array:
    """sel_BTH int32: the full past chunk that each query selects, -1 in the first chunk."""
    assert selection == "exact", selection
    if chunk_size >= q_BTHK.shape[1]:  # no query has a full chunk behind it
        return jnp.full(q_BTHK.shape[:3], -1, jnp.int32)
    f = partial(exact, chunk_size=chunk_size, scale=scale)
    return fold_vmap(f, "b t (g r) k, b t g k -> b t (g r)", **heads(q_BTHK, k_BTGK))(q_BTHK, k_BTGK)


def exact(
    q_BTHK: Array,
    k_BTGK: Array,
    *,
    chunk_size: int,
    scale: float,
    tile: Tiles | None = None,
    interpret: bool | None = None,
) -> Array:
    """By probability mass; `tile` is for tuning, `interpret` for compiling where there is no GPU."""
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    tile = tile or tiles(K, chunk_size)
    interpret = dispatch.platform() == "cpu" if interpret is None else interpret
    per_tile = tile.rows * tile.groups
    n_tiles = -(-T // per_tile)
    bounded = Sizes(
        H=H,
        R=H // G,
        K=K,
        C=chunk_size,
        tiles=n_tiles,
        full=(T - 1) // chunk_size,
        dtype=q_BTHK.dtype,
        log2_scale=scale * LOG2_E,
        bounded=True,
        block=128 if chunk_size % 128 == 0 else 64,
        rows=tile.rows,
        groups=tile.groups,
        stages=tile.stages,
        poly=0 if interpret else tile.poly,  # on a CPU, XLA cancels the polynomial's rounding: (x + a) - a is x to it
        style=tile.style,
        registers=tile.registers,
    )
    if chunk_size % tile.rows or (tile.style != "plain" and chunk_size != bounded.block):
        raise ValueError(
            f"{tile} does not fit chunks of {chunk_size}: rows must divide them, and only plain splits them"
        )
    plain = bounded._replace(bounded=False, style="plain")
    run = partial(kernels.call, B=B, T=n_tiles * per_tile, interpret=interpret, semantics=tile.semantics)
    padded_BTHK = jnp.pad(q_BTHK, ((0, 0), (0, n_tiles * per_tile - T), (0, 0), (0, 0)))
    if T % 8:  # copies tile the sequence by 8
        k_BTGK = k_BTGK[:, : bounded.full * chunk_size]
    is_bounded = _largest_score(q_BTHK, k_BTGK) * abs(scale) * LOG2_E <= BOUND
    sel_BHT = lax.cond(is_bounded, run(bounded), run(plain), padded_BTHK, k_BTGK)
    return jnp.swapaxes(sel_BHT[:, :, :T], 1, 2)


def _largest_score(q_BTHK: Array, k_BTGK: Array) -> Array:
    """[] fp32: no |q . k| of a query and a key of its head is larger."""
    square = [jnp.max(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1), axis=1) for x in (q_BTHK, k_BTGK)]
    return jnp.max(jnp.sqrt(square[0] * jnp.repeat(square[1], q_BTHK.shape[2] // k_BTGK.shape[2], axis=1)))
