"""Launch the Triton kernels of the compressed attention; custom VJP and tile sizes.

Up to `Tile.n` blocks are one tile: a backward pass is then one kernel, which reads q and do once.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas import device
from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.compressed_attention.triton import kernels
from kernels_pallas.numerics import LOG2_E
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import padded, precision

PROGRAMS = 512  # programs of the dk kernel, at least, if there are enough queries


class Tile(NamedTuple):
    """Queries `m` and blocks `n` of a step, warps, and stages."""

    m: int
    n: int
    warps: int
    stages: int


def tile_of(kernel: str, dim: int, n_blocks: int, dtype: Any) -> Tile:
    """Return the tile of "forward", "dk" or "dq" for the wider head dim."""
    blocks = padded(n_blocks)
    if interpreter.is_chosen():  # small: tests then cover several tiles
        return Tile(16, 16, 4, 1)
    is_wide = padded(dim) > 64
    if jnp.dtype(dtype).itemsize > 2:
        return Tile(32, min(blocks, 32), 8 if is_wide else 4, 1)
    # Before Hopper, operands lie in registers: less fits.
    is_ampere = (device.compute_capability() or device.AMPERE) < device.HOPPER
    rows = 32 if is_ampere and kernel != "forward" else 64
    warps = 8 if is_wide or (is_ampere and kernel == "dk") else 4
    return Tile(rows, min(blocks, 64), warps, 1 if is_wide else 2)


def run(
    q_BTHK: Array,
    k_mean_BcGK: Array,
    v_mean_BcGV: Array,
    positions_T: Array | None,
    *,
    block_size: int,
    top_k: int,
) -> tuple[Array, Array]:
    """Return the attention and the choice."""
    assert positions_T is None, "the kernels compute positions"
    return _attend(q_BTHK, k_mean_BcGK, v_mean_BcGV, block_size, top_k)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(q_BTHK: Array, k_BcGK: Array, v_BcGV: Array, C: int, top_k: int) -> tuple[Array, Array]:
    return forward(q_BTHK, k_BcGK, v_BcGV, C, top_k)[0]


_Q, _K, _V, _O, _ROW = "b t (g r) k", "b c g k", "b c g v", "b t (g r) v", "b t (g r)"  # sharding rules (batching.py)


def forward(q_BTHK: Array, k_BcGK: Array, v_BcGV: Array, C: int, top_k: int) -> tuple[tuple[Array, Array], tuple]:
    """Return the attention and the choice, and what the backward pass needs."""
    f = fold_vmap(
        partial(_forward, C=C, top_k=top_k), f"{_Q}, {_K}, {_V} -> {_O}, {_ROW}, b t g n", **heads(q_BTHK, k_BcGK)
    )
    o_BTHV, lse_BTH, sel_BTGn = f(q_BTHK, k_BcGK, v_BcGV)
    o_BTHV = checkpoint_name(o_BTHV, "attention_out")
    return (o_BTHV, sel_BTGn), (q_BTHK, k_BcGK, v_BcGV, o_BTHV, checkpoint_name(lse_BTH, "attention_lse"))


def backward(C: int, top_k: int, saved: tuple[Array, ...], gradients: tuple[Array, Any]) -> tuple[Array, ...]:
    """Return the gradients of queries, mean keys and mean values."""
    del top_k
    rule = f"{_Q}, {_K}, {_V}, {_O}, {_ROW}, {_O} -> {_Q}, {_K}, {_V}"
    return fold_vmap(partial(_backward, C=C), rule, **heads(*saved[:2]))(*saved, gradients[0])


_attend.defvjp(forward, backward)


def _sizes(q_BTHK: Array, v_BcGV: Array, C: int) -> dict[str, Any]:
    """Return the constants of all kernels."""
    (_, T, H, K), (NC, G, V) = q_BTHK.shape, v_BcGV.shape[1:]
    sizes = {"T": T, "H": H, "G": G, "K": K, "V": V, "KP": padded(K), "VP": padded(V), "C": C, "NC": NC}
    return sizes | {"LOG2_SCALE": LOG2_E * K**-0.5, "PRECISION": precision(q_BTHK.dtype)}


def _at(tile: Tile) -> dict[str, Any]:
    """Return the launch options of a tile."""
    return {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "num_warps": tile.warps, "num_stages": tile.stages}


def _forward(q_BTHK: Array, k_BcGK: Array, v_BcGV: Array, *, C: int, top_k: int) -> tuple[Array, ...]:
    (B, T, H, K), (NC, G, V) = q_BTHK.shape, v_BcGV.shape[1:]
    tile = tile_of("forward", max(K, V), NC, q_BTHK.dtype)
    return runtime.launch(
        kernels.forward_kernel,
        *(q_BTHK, k_BcGK, v_BcGV),
        out_shape=[
            jax.ShapeDtypeStruct((B, T, H, V), q_BTHK.dtype),
            jax.ShapeDtypeStruct((B, T, H), jnp.float32),
            jax.ShapeDtypeStruct((B, T, G, top_k), jnp.int32),
        ],
        grid=(-(-T // tile.m) * B * G,),
        name="compressed_attention",
        TOP_K=top_k,
        TOP_KP=1 << (top_k - 1).bit_length(),
        RP=1 << (H // G - 1).bit_length(),
        **_sizes(q_BTHK, v_BcGV, C),
        **_at(tile),
    )


def _backward(
    q_BTHK: Array, k_BcGK: Array, v_BcGV: Array, o_BTHV: Array, lse_BTH: Array, do_BTHV: Array, *, C: int
) -> tuple[Array, ...]:
    (B, T, H, K), (NC, G, V) = q_BTHK.shape, v_BcGV.shape[1:]
    tile = tile_of("dk", max(K, V), NC, q_BTHK.dtype)
    tiles, steps = -(-NC // tile.n), -(-T // tile.m)
    each = max(1, B * G * tiles * steps // PROGRAMS)  # steps of a program
    splits = -(-steps // each)
    sizes = _sizes(q_BTHK, v_BcGV, C) | {"SCALE": K**-0.5}
    D_BTH = lse_BTH  # a placeholder, not read with one tile
    if tiles > 1:
        D_BTH = jnp.einsum("bthv,bthv->bth", do_BTHV.astype(jnp.float32), o_BTHV.astype(jnp.float32))
    operands = (q_BTHK, k_BcGK, v_BcGV, do_BTHV, lse_BTH, D_BTH)
    dq = jax.ShapeDtypeStruct(q_BTHK.shape, q_BTHK.dtype)
    dk_BsNGK, dv_BsNGV, dq_BTHK = runtime.launch(
        kernels.dk_kernel,
        *operands,
        out_shape=[
            *(jax.ShapeDtypeStruct((B, splits, NC, G, dim), jnp.float32) for dim in (K, V)),
            dq if tiles == 1 else jax.ShapeDtypeStruct((1,), dq.dtype),  # one entry: not written
        ],
        grid=(splits * tiles * B * G,),
        name="compressed_attention_dk",
        SPLITS=splits,
        ROWS=each * tile.m,
        **sizes,
        **_at(tile),
    )
    if tiles > 1:
        tile = tile_of("dq", max(K, V), NC, q_BTHK.dtype)
        (dq_BTHK,) = runtime.launch(
            kernels.dq_kernel,
            *operands,
            out_shape=[dq],
            grid=(-(-T // tile.m) * B * H,),
            name="compressed_attention_dq",
            **sizes,
            **_at(tile),
        )
    return dq_BTHK, dk_BsNGK.sum(1), dv_BsNGV.sum(1)
