"""The `triton` backend of Top-1 Chunk: launches of the kernels beside it, tile sizes.

Two schedules with the same result, by length unless one is named (docs/kernels.md has the measurements):

    sorted   selection; rows sorted by it (triton_plan.py); remote pass, local pass. T C K work beside the selection
    fused    all of it in one kernel (triton_fused_kernels.py), T^2 K work; its backward pass is the sorted one

Arrays stay [B, T, H, D]; the kernels read them with strides. fp32 inputs are multiplied as three TF32 products, with an
error near fp32's own; bf16 and fp16 products are exact, sums fp32. Two runs give the same bits.
"""

import math
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import checks, compat
from kernels_pallas.batching import fold_vmap
from kernels_pallas.top1_chunk import (
    triton_attend_kernels,
    triton_fused_kernels,
    triton_grad_kernels,
    triton_plan,
    triton_select_kernels,
)
from kernels_pallas.top1_chunk.triton_tiles import Tiles, grad_keys, tiles
from kernels_pallas.triton_probe import padded, precision

LOG2_E = 1 / math.log(2)
SCHEDULES = ("sorted", "fused")
FUSED_UP_TO = 0  # tokens per sequence; measured


def select(q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, selection: str, scale: float) -> Array:
    """sel_BTH int32: the full past chunk that each query selects, -1 in the first chunk."""
    if chunk_size >= q_BTHK.shape[1]:  # no query has a full chunk behind it
        return jnp.full(q_BTHK.shape[:3], -1, jnp.int32)
    f = partial(exact, scale=scale) if selection == "exact" else approx
    return fold_vmap(partial(f, chunk_size=chunk_size))(q_BTHK, k_BTGK)


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
    mean_BpcGK = _means(k_BTGK, chunk_size)
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


def _means(k_BTGK: Array, C: int) -> Array:
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


class Attend(NamedTuple):
    """Attention given a selection, and its gradient. Hashable, so static."""

    schedule: str | None

    def fused(
        self, q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, chunk_size: int, selection: str, scale: float
    ) -> tuple[Array, Array, Array] | None:
        """(sel_BTH, o_BTHV, lse_BTH) in one kernel, or None where selecting first is the schedule."""
        if (self.schedule or ("fused" if q_BTHK.shape[1] <= FUSED_UP_TO else "sorted")) != "fused":
            return None
        f = partial(_fused, C=chunk_size, selection=selection, scale=scale)
        return fold_vmap(f)(q_BTHK, k_BTGK, v_BTGV)

    def forward(
        self, q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, sel_BTH: Array, *, chunk_size: int, scale: float
    ) -> tuple[Array, Array]:
        """(o_BTHV in v's dtype, lse_BTH fp32)."""
        return fold_vmap(partial(_forward, C=chunk_size, scale=scale))(q_BTHK, k_BTGK, v_BTGV, sel_BTH)

    def backward(
        self,
        q_BTHK: Array,
        k_BTGK: Array,
        v_BTGV: Array,
        o_BTHV: Array,
        lse_BTH: Array,
        sel_BTH: Array,
        do_BTHV: Array,
        *,
        chunk_size: int,
        scale: float,
    ) -> tuple[Array, Array, Array]:
        """(dq, dk, dv), each in the layout and dtype of its primal."""
        f = fold_vmap(partial(_backward, C=chunk_size, scale=scale))
        return f(q_BTHK, k_BTGK, v_BTGV, o_BTHV, lse_BTH, sel_BTH, do_BTHV)


@cache
def attend(schedule: str | None = None) -> Attend:
    """The attention of this backend with a schedule by name, or by length."""
    if schedule is not None:
        checks.check_choice("schedule of the triton backend", schedule, SCHEDULES)
    return Attend(schedule)


def _sizes(q_BTHK: Array, v_BTGV: Array, C: int, scale: float) -> dict:
    """What all attention kernels are told."""
    (_, T, H, K), (G, V) = q_BTHK.shape, v_BTGV.shape[2:]
    sizes = {"T": T, "H": H, "G": G, "K": K, "V": V, "KP": padded(K), "VP": padded(V), "C": C}
    return sizes | {"LOG2_SCALE": scale * LOG2_E, "PRECISION": precision(q_BTHK.dtype)}


def _fused(
    q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, C: int, selection: str, scale: float
) -> tuple[Array, Array, Array]:
    (B, T, H, K), V = q_BTHK.shape, v_BTGV.shape[-1]
    tile = tiles("fused", max(K, V), C, q_BTHK.dtype)
    by_mean = selection == "approx" and T >= C
    means = _means(k_BTGK, C) if by_mean else k_BTGK
    sel_BTH, o_BTHV, lse_BTH = compat.launch(
        triton_fused_kernels.fused_kernel,
        *(q_BTHK, k_BTGK, v_BTGV, means),
        out_shape=[
            jax.ShapeDtypeStruct((B, T, H), jnp.int32),
            jax.ShapeDtypeStruct((B, T, H, V), v_BTGV.dtype),
            jax.ShapeDtypeStruct((B, T, H), jnp.float32),
        ],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_fused",
        **_sizes(q_BTHK, v_BTGV, C, scale),
        PARTS=means.shape[1] if by_mean else 0,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
    )
    return sel_BTH, o_BTHV, lse_BTH


def _forward(
    q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, sel_BTH: Array, *, C: int, scale: float
) -> tuple[Array, Array]:
    B, T, H, K = q_BTHK.shape
    n_chunks, sizes = -(-T // C), _sizes(q_BTHK, v_BTGV, C, scale)
    dim, V = max(K, v_BTGV.shape[-1]), v_BTGV.shape[-1]
    fp32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    far = (q_BTHK, q_BTHK)  # not read without a second chunk
    if n_chunks > 1:
        NC, tile = n_chunks - 1, tiles("remote", dim, C, q_BTHK.dtype)
        plan = triton_plan.make(sel_BTH, NC)
        blocks = triton_plan.most_items(T - C, NC, tile.m)
        far = compat.launch(
            triton_attend_kernels.remote_kernel,
            *(q_BTHK, k_BTGK, v_BTGV, *plan, triton_plan.item_ends(plan, tile.m)),
            out_shape=[fp32((B, T, H, V)), fp32((B, T, H))],
            grid=(blocks * B * H,),
            num_warps=tile.warps,
            num_stages=tile.stages,
            name="top1_chunk_remote",
            **sizes,
            NC=NC,
            NCP=padded(NC),
            BLOCKS=blocks,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
        )
    tile = tiles("local", dim, C, q_BTHK.dtype)
    o_BTHV, lse_BTH = compat.launch(
        triton_attend_kernels.local_kernel,
        *(q_BTHK, k_BTGK, v_BTGV, *far),
        out_shape=[jax.ShapeDtypeStruct((B, T, H, V), v_BTGV.dtype), fp32((B, T, H))],
        grid=(n_chunks * -(-C // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_local",
        **sizes,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
    )
    return o_BTHV, lse_BTH


def _backward(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    o_BTHV: Array,
    lse_BTH: Array,
    sel_BTH: Array,
    do_BTHV: Array,
    *,
    C: int,
    scale: float,
) -> tuple[Array, Array, Array]:
    (B, T, H, K), V = q_BTHK.shape, v_BTGV.shape[-1]
    n_chunks = -(-T // C)
    dim, NC = max(K, V), n_chunks - 1
    keys = grad_keys(dim, C, q_BTHK.dtype)
    pieces = -(-C // keys)
    sizes = _sizes(q_BTHK, v_BTGV, C, scale) | {"SCALE": scale, "NC": NC, "BLOCK_N": keys, "PIECES": pieces}
    fp32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    D_BTH = jnp.einsum("bthv,bthv->bth", do_BTHV.astype(jnp.float32), o_BTHV.astype(jnp.float32))
    operands = (q_BTHK, k_BTGK, v_BTGV, do_BTHV, LOG2_E * lse_BTH, D_BTH)
    ends_BHc, far, segments = sel_BTH, (D_BTH, D_BTH, D_BTH), 0  # none is read without a second chunk
    if n_chunks > 1:
        tile = tiles("remote_grad", dim, C, q_BTHK.dtype)
        segment = tile.m * tile.n
        plan = triton_plan.make(sel_BTH, NC)
        ends_BHc, segments = triton_plan.item_ends(plan, segment), triton_plan.most_items(T - C, NC, segment)
        far = compat.launch(
            triton_grad_kernels.remote_grad_kernel,
            *(*operands, *plan, ends_BHc),
            out_shape=[fp32((pieces, B, T, H, K)), fp32((B, H, segments, C, K)), fp32((B, H, segments, C, V))],
            grid=(segments * pieces * B * H,),
            num_warps=tile.warps,
            num_stages=tile.stages,
            name="top1_chunk_remote_grad",
            **sizes,
            NCP=padded(NC),
            SEGMENTS=segments,
            SEGMENT=segment,
            BLOCK_M=tile.m,
        )
    tile = tiles("local_grad", dim, C, q_BTHK.dtype)
    dq_dtype = q_BTHK.dtype if pieces == 1 else jnp.float32
    dq_pBTHK, dk_BTGK, dv_BTGV = compat.launch(
        triton_grad_kernels.local_grad_kernel,
        *(*operands, ends_BHc, *far),
        out_shape=[
            jax.ShapeDtypeStruct((pieces, B, T, H, K), dq_dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BTGK, v_BTGV)),
        ],
        grid=(n_chunks * pieces * B * k_BTGK.shape[2],),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_local_grad",
        **sizes,
        SEGMENTS=segments,
        BLOCK_M=tile.m,
    )
    dq_BTHK = dq_pBTHK[0] if pieces == 1 else dq_pBTHK.sum(0).astype(q_BTHK.dtype)
    return dq_BTHK, dk_BTGK, dv_BTGV
