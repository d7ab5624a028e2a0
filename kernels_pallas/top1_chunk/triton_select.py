"""The `triton` backend of chunk selection: launches of triton_select_kernels.py.

Arrays stay [B, T, H, D]; the kernels read them with strides.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import compat
from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.top1_chunk import triton_select_kernels
from kernels_pallas.top1_chunk.triton_tiles import Tiles, tiles
from kernels_pallas.triton_probe import padded, precision

LOG2_E = 1 / math.log(2)


def select(q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, selection: str, scale: float) -> Array:
    """sel_BTH int32: the full past chunk that each query selects, -1 in the first chunk."""
    if chunk_size >= q_BTHK.shape[1]:  # no query has a full chunk behind it
        return jnp.full(q_BTHK.shape[:3], -1, jnp.int32)
    f = partial(exact, scale=scale) if selection == "exact" else approx
    rule = "b t (g r) k, b t g k -> b t (g r)"
    return fold_vmap(partial(f, chunk_size=chunk_size), rule, **heads(q_BTHK, k_BTGK))(q_BTHK, k_BTGK)


def exact(q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, scale: float, tile: Tiles | None = None) -> Array:
    """By probability mass; `tile` is for tuning."""
    B, T, H, K = q_BTHK.shape
    tile = tile or tiles("exact", K, chunk_size, q_BTHK.dtype)
    ptx = "" if compat.is_interpreted() else triton_select_kernels.exponentials(tile.poly, scale * LOG2_E)
    bounded_BH = _largest_score(q_BTHK, k_BTGK) * abs(scale) * LOG2_E <= triton_select_kernels.BOUND
    (sel_BTH,) = compat.launch(
        triton_select_kernels.exact_kernel,
        q_BTHK,
        k_BTGK,
        bounded_BH.astype(jnp.int32),
        out_shape=[jax.ShapeDtypeStruct((B, T, H), jnp.int32)],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_exact",
        T=T,
        H=H,
        G=k_BTGK.shape[2],
        K=K,
        KP=padded(K),
        C=chunk_size,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        LOG2_SCALE=scale * LOG2_E,
        PTX=ptx,
        PRECISION=precision(q_BTHK.dtype),
    )
    return sel_BTH


def _largest_score(q_BTHK: Array, k_BTGK: Array) -> Array:
    """[B, H] fp32: no |q . k| of the head is larger."""
    square = [jnp.max(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1), axis=1) for x in (q_BTHK, k_BTGK)]
    return jnp.sqrt(square[0] * jnp.repeat(square[1], q_BTHK.shape[2] // k_BTGK.shape[2], axis=1))


def approx(q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, tile: Tiles | None = None) -> Array:
    """By q . mean key. The scale, if positive, does not move an argmax."""
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    mean_BpcGK = means(k_BTGK, chunk_size)
    tile = tile or tiles("approx", K, chunk_size, q_BTHK.dtype)
    (sel_BTH,) = compat.launch(
        triton_select_kernels.approx_kernel,
        q_BTHK,
        mean_BpcGK,
        out_shape=[jax.ShapeDtypeStruct((B, T, H), jnp.int32)],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_approx",
        T=T,
        H=H,
        G=G,
        K=K,
        KP=padded(K),
        C=chunk_size,
        N_FULL=T // chunk_size,
        PARTS=mean_BpcGK.shape[1],
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        PRECISION=precision(q_BTHK.dtype),
    )
    return sel_BTH


def means(k_BTGK: Array, C: int) -> Array:
    """Mean key of every full chunk in k's dtype, [B, parts, T // C, G, K]: parts that add up to the fp32 means.

    Products of 16-bit parts with 16-bit queries are exact, and faster than fp32 ones.
    """
    B, T, G, K = k_BTGK.shape
    k_BcCGK = k_BTGK[:, : T // C * C].reshape(B, T // C, C, G, K)
    mean_BcGK = jnp.mean(k_BcCGK.astype(jnp.float32), axis=2)
    info, parts = jnp.finfo(k_BTGK.dtype), []
    for _ in range({"float32": 1, "float16": 2, "bfloat16": 3}[k_BTGK.dtype.name]):
        # not astype there and back, which XLA takes for a chance to keep the excess precision
        parts.append(jax.lax.reduce_precision(mean_BcGK, info.nexp, info.nmant))
        mean_BcGK = mean_BcGK - parts[-1]
    return jnp.stack(parts, axis=1).astype(k_BTGK.dtype)
