"""Launch the Triton kernels of the chunk-start states; tile sizes.

All arrays are float32. `Precision.DEFAULT` uses single TF32 products, because the inputs had 8 bits anyway. Other
precisions use three TF32 products, whose error is close to float32.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap
from kernels_pallas.state_scan.triton import kernels
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import padded


class Tile(NamedTuple):
    """Tile settings for a kernel.

    v: columns per program; warps: warps per program; stages: chunks in flight.
    """

    v: int
    warps: int
    stages: int


# Keyed by padded key dim and single TF32 products. Shared memory holds P of all stages, 4 K^2 bytes each, and where
# possible leaves room for a second program. Nothing spills, except up to 44 bytes on sm90 for (128, False), which keeps
# P in registers in two halves.
TILES = {
    (64, True): Tile(32, 4, 3),
    (64, False): Tile(16, 4, 3),
    (128, True): Tile(32, 8, 2),
    (128, False): Tile(16, 8, 2),
}
BLOCK, BLOCK_WARPS, AHEAD = 512, 4, 4  # for the elementwise kernel


def products(
    decay_cBHk: Array, p_cBHKK: Array, r_cBHKV: Array, s_BHKV: Array, *, precision: jax.lax.Precision, reverse: bool
) -> tuple[Array, Array]:
    """Return (states [c, B, H, K, V], last [B, H, K, V]).

    `decay_cBHk` has K entries per head or one.
    """
    is_single = precision == jax.lax.Precision.DEFAULT
    decays = "k" if decay_cBHk.shape[-1] == s_BHKV.shape[-2] else "one"
    rule = f"c b g {decays}, c b g k l, c b g k v, start b g k v -> c b g k v, start b g k v"
    run = fold_vmap(partial(products_share, is_single=is_single, reverse=reverse), rule, axis=1)
    states, last = run(decay_cBHk, p_cBHKK, r_cBHKV, s_BHKV[None])
    return states, last[0]


def elementwise(decay_Bc: Array, update_Bc: Array, initial_B: Array, *, reverse: bool) -> tuple[Array, Array]:
    """Return (states [B, c, ...], last [B, ...]).

    `decay_Bc` broadcasts against `update_Bc`, except on the chunk axis.
    """
    decay_Bc = jnp.broadcast_to(decay_Bc, (update_Bc.shape[0], *decay_Bc.shape[1:]))
    dims = [f"d{i}" for i in range(update_Bc.ndim - 2)]  # each dim may be sharded
    pairs = zip(dims, decay_Bc.shape[2:], update_Bc.shape[2:], strict=True)
    decays, state = " ".join(d if have == want else f"one_{d}" for d, have, want in pairs), " ".join(dims)
    rule = f"b c {decays}, b c {state}, b {state} -> b c {state}, b {state}"
    run = fold_vmap(partial(elementwise_share, reverse=reverse), rule, split=("b", *dims))
    return run(decay_Bc, update_Bc, initial_B)


def products_share(
    decay: Array, p: Array, r: Array, s: Array, *, is_single: bool, reverse: bool
) -> tuple[Array, Array]:
    """Compute `products` without rules for vmap and sharding.

    `is_single` selects single TF32 products; otherwise each product is three TF32 products.
    """
    n_chunks, B, H, K, V = r.shape
    tile = tile_of(K, is_single)
    block = min(tile.v, padded(V))
    states, last = runtime.launch(
        kernels.products_kernel,
        decay,
        p,
        r,
        s,
        out_shape=[jax.ShapeDtypeStruct(r.shape, r.dtype), jax.ShapeDtypeStruct(s.shape, r.dtype)],
        grid=(-(-V // block) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="state_scan_reverse" if reverse else "state_scan",
        CHUNKS=n_chunks,
        M=B * H,
        K=K,
        V=V,
        KP=padded(K),
        DECAYS=decay.shape[-1],
        BLOCK_V=block,
        REVERSE=reverse,
        PRECISION="tf32" if is_single else "tf32x3",
        STAGES=tile.stages,
    )
    return states, last


def tile_of(key_dim: int, is_single: bool) -> Tile:
    """Return the tile; the interpreter's small tile gives several programs per head."""
    return Tile(16, 4, 1) if interpreter.is_chosen() else TILES[(64 if key_dim <= 64 else 128, is_single)]


def elementwise_share(decay: Array, update: Array, initial: Array, *, reverse: bool) -> tuple[Array, Array]:
    """Compute `elementwise` without rules for vmap and sharding.

    `decay` has the batch size of `update`.
    """
    B, n_chunks, *shape = update.shape
    runs = _runs(decay.shape[2:], shape)
    if runs is None:
        decay, runs = jnp.broadcast_to(decay, update.shape), (math.prod(shape), 1)
    middle, inner = runs
    size = math.prod(shape)
    block = 16 if interpreter.is_chosen() else BLOCK
    states, last = runtime.launch(
        kernels.elementwise_kernel,
        decay,
        update,
        initial,
        out_shape=[jax.ShapeDtypeStruct(update.shape, update.dtype), jax.ShapeDtypeStruct(initial.shape, update.dtype)],
        grid=(-(-size // block) * B,),
        num_warps=BLOCK_WARPS,
        name="state_passing_reverse" if reverse else "state_passing",
        CHUNKS=n_chunks,
        SIZE=size,
        MIDDLE=middle,
        INNER=inner,
        BLOCK=block,
        AHEAD=min(AHEAD, n_chunks),
        REVERSE=reverse,
    )
    return states, last


def _runs(decay_shape: tuple[int, ...], shape: Sequence[int]) -> tuple[int, int] | None:
    """Return (number of decays, consecutive state entries per decay).

    None if decayed and broadcast axes alternate.
    """
    own = [i for i, (have, want) in enumerate(zip(decay_shape, shape, strict=True)) if have == want > 1]
    if not own:
        return 1, 1
    if own != list(range(own[0], own[-1] + 1)):
        return None
    return math.prod(shape[own[0] : own[-1] + 1]), math.prod(shape[own[-1] + 1 :])
