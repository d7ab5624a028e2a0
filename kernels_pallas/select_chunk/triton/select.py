"""Chunk selection in Triton: launches of kernels.py.

Arrays stay [B, T, H, D]; the kernels read them with strides.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.numerics import LOG2_E, score_bound
from kernels_pallas.select_chunk.int8 import quantize_keys, quantize_queries
from kernels_pallas.select_chunk.tables import Shortlist
from kernels_pallas.select_chunk.triton import kernels
from kernels_pallas.select_chunk.triton.tile_sizes import tiles
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import padded, precision


def select(
    q_BTHK: Array,
    k_BTGK: Array,
    *,
    chunk_size: int,
    selection: str,
    top_k: int = 1,
    shortlist: Shortlist | None = None,
    scale: float,
) -> Array:
    """Return sel_BTH int32: the full past chunk that each query selects, -1 in the first chunk.

    With a top_k above 1, which only approx takes, sel_BTHk: the best first, -1 after the last past chunk.
    """
    assert shortlist is None and (top_k == 1 or selection == "approx"), (top_k, shortlist)
    several = () if top_k == 1 else (top_k,)
    if chunk_size >= q_BTHK.shape[1]:  # no query has a full chunk before it
        return jnp.full((*q_BTHK.shape[:3], *several), -1, jnp.int32)
    q, k, sel = "b t (g r) k", "b t g k", "b t (g r)" + " n" * len(several)
    if selection == "best_key_int8":  # rounded out here: jax-triton 0.4 fails where JAX looks for dead code around it
        f, rule = partial(best_key, scale=scale), f"{q}, b s g k, b c g -> {sel}"
        operands = quantize_queries(q_BTHK), *quantize_keys(k_BTGK, chunk_size)
    else:
        if selection == "approx":
            f = partial(approx, top_k=top_k)
        else:
            f = partial(exact if selection == "exact" else best_key, scale=scale)
        rule, operands = f"{q}, {k} -> {sel}", (q_BTHK, k_BTGK)
    return fold_vmap(partial(f, chunk_size=chunk_size), rule, **heads(q_BTHK, k_BTGK))(*operands)


def exact(q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, scale: float) -> Array:
    """Select by probability mass."""
    B, T, H, K = q_BTHK.shape
    q_BTHK, scale = _with_sign(q_BTHK, scale), abs(scale) or 1.0
    tile = tiles("exact", K, chunk_size, q_BTHK.dtype)
    ptx = "" if interpreter.is_chosen() else kernels.exponentials(tile.poly, scale * LOG2_E)
    bounded_BH = score_bound(q_BTHK, k_BTGK) * scale * LOG2_E <= kernels.BOUND
    (sel_BTH,) = runtime.launch(
        kernels.exact_kernel,
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


def _with_sign(q_BTHK: Array, scale: float) -> Array:
    """Return q times the sign of the scale: the kernels mask scores with -inf before they scale them."""
    return q_BTHK if scale > 0 else q_BTHK * jnp.sign(scale).astype(q_BTHK.dtype)


def best_key(q_BTHK: Array, k_BTGK: Array, step_BcG: Array | None = None, *, chunk_size: int, scale: float) -> Array:
    """Select by the largest score. Of the scale, the sign alone moves an argmax.

    With the steps of chunks, queries and keys are 8-bit integers, the keys those of full chunks alone (int8.py).
    """
    B, T, H, K = q_BTHK.shape
    int8 = step_BcG is not None
    tile = tiles("best_key", K, chunk_size, q_BTHK.dtype)
    (sel_BTH,) = runtime.launch(
        kernels.best_key_kernel,
        _with_sign(q_BTHK, scale),
        k_BTGK,
        step_BcG if int8 else k_BTGK,  # which is not read
        out_shape=[jax.ShapeDtypeStruct((B, T, H), jnp.int32)],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_best_key_int8" if int8 else "top1_chunk_best_key",
        T=T,
        TK=k_BTGK.shape[1],
        H=H,
        G=k_BTGK.shape[2],
        K=K,
        KP=max(padded(K), 32 if int8 else 16),  # 8-bit products take no fewer
        C=chunk_size,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        INT8=int8,
        PRECISION=precision(q_BTHK.dtype),
    )
    return sel_BTH


def approx(q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, top_k: int = 1) -> Array:
    """Select by q . mean key. The scale, if positive, does not move an argmax."""
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    k_most = min(top_k, (T - 1) // chunk_size)  # no query has more chunks before its own
    mean_BpcGK = _mean_parts(k_BTGK, chunk_size)
    tile = tiles("approx", K, chunk_size, q_BTHK.dtype)
    (sel_BTHk,) = runtime.launch(
        kernels.approx_kernel,
        q_BTHK,
        mean_BpcGK,
        out_shape=[jax.ShapeDtypeStruct((B, T, H, k_most), jnp.int32)],
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
        TOP_K=k_most,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        PRECISION=precision(q_BTHK.dtype),
    )
    if top_k == 1:
        return sel_BTHk[..., 0]
    return jnp.pad(sel_BTHk, ((0, 0), (0, 0), (0, 0), (0, top_k - k_most)), constant_values=-1)


def _mean_parts(k_BTGK: Array, C: int) -> Array:
    """Return the mean key of every full chunk as parts in k's dtype, [B, parts, T // C, G, K].

    The parts add up to the fp32 means. Their products with 16-bit queries are exact, and faster than fp32 ones.
    """
    B, T, G, K = k_BTGK.shape
    k_BcCGK = k_BTGK[:, : T // C * C].reshape(B, T // C, C, G, K)
    mean_BcGK = jnp.mean(k_BcCGK.astype(jnp.float32), axis=2)
    info, parts = jnp.finfo(k_BTGK.dtype), []
    for _ in range({"float32": 1, "float16": 2, "bfloat16": 3}[k_BTGK.dtype.name]):
        # Not astype there and back, which XLA takes for a chance to keep the excess precision. The exponent is
        # float32's, because reduce_precision flushes subnormal numbers, which the second part in float16 often is.
        parts.append(jax.lax.reduce_precision(mean_BcGK, 8, info.nmant))
        mean_BcGK = mean_BcGK - parts[-1]
    return jnp.stack(parts, axis=1).astype(k_BTGK.dtype)
