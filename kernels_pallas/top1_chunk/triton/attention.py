"""Launch the Triton kernels of attention to selected chunks.

`sel` is [B, T, S], one past chunk per query and selection, or [B, T, S, k] for k different past chunks; -1 selects none
(`top1_chunk/api.py`). Each head has a selection, S = H, or the heads of a key-value head share one, S = G. A query that
selects k chunks has k rows, and rows are sorted by selected chunk (sort_plan.py). A remote pass attends to the selected
chunks (k T C K work), then a local pass attends to the local chunk (T C K work). The remote pass gives each row a
partial softmax result, and the local pass joins them. Partial results use v's dtype, or fp32 for k = 1.

With packed documents the kernels also read `start`, the first token of each query's document, and any query may have no
chunk.

Arrays stay [B, T, H, D], and the kernels read them with strides. fp32 inputs use three TF32 products, with an error
near fp32's. bf16 and fp16 products are exact, sums are fp32. Two runs give the same bits.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.numerics import LOG2_E
from kernels_pallas.select_chunk import documents
from kernels_pallas.top1_chunk.triton import attention_bwd_kernels, attention_kernels
from kernels_pallas.top1_chunk.triton.tile_sizes import bwd_keys, tiles
from kernels_pallas.triton import runtime, sort_plan
from kernels_pallas.triton.blocks import padded, precision

MOST_AT_ONCE = 8  # loads in one step of a loop wait together; 8 of heads wider than 64 spill registers


def forward(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    sel_BTH: Array,
    *,
    chunk_size: int,
    scale: float,
    segments_BT: Array | None = None,
) -> tuple[Array, Array]:
    """Return (o_BTHV in v's dtype, lse_BTH fp32)."""
    f = partial(_forward, C=chunk_size, scale=scale)
    rule, packed = f"b t (g r) k, b t g k, b t g v, {_names(sel_BTH, k_BTGK)}", ()
    if segments_BT is not None:
        rule, packed = f"{rule}, b t", (documents.starts(segments_BT),)
    run = fold_vmap(f, f"{rule} -> b t (g r) v, b t (g r)", **heads(q_BTHK, k_BTGK))
    return run(q_BTHK, k_BTGK, v_BTGV, sel_BTH, *packed)


def backward(
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
    segments_BT: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), each in the layout and dtype of its primal."""
    rows = f"b t (g r) k, b t g k, b t g v, b t (g r) v, b t (g r), {_names(sel_BTH, k_BTGK)}, b t (g r) v"
    packed = ()
    if segments_BT is not None:
        rows, packed = f"{rows}, b t", (documents.starts(segments_BT),)
    rule = f"{rows} -> b t (g r) k, b t g k, b t g v"
    f = fold_vmap(partial(_backward, C=chunk_size, scale=scale), rule, **heads(q_BTHK, k_BTGK))
    return f(q_BTHK, k_BTGK, v_BTGV, o_BTHV, lse_BTH, sel_BTH, do_BTHV, *packed)


def _names(sel_BTS: Array, k_BTGK: Array) -> str:
    """Return the einops dims of a selection, per key-value head or per head, with one chunk or several chunks."""
    names = "b t g" if sel_BTS.shape[2] == k_BTGK.shape[2] else "b t (g r)"
    return names if sel_BTS.ndim == 3 else f"{names} n"


def _rows(sel_BTH: Array) -> tuple[Array, int]:
    """Return the selection as rows [B, T k, S] (consecutive for a query), and k."""
    if sel_BTH.ndim == 3:
        return sel_BTH, 1
    B, T, S, top_k = sel_BTH.shape
    return sel_BTH.swapaxes(2, 3).reshape(B, T * top_k, S), top_k


def at_once(top_k: int, width: int) -> int:
    """Return how many results of a query, `width` channels each, the local passes load at a time."""
    return min(top_k, MOST_AT_ONCE if padded(width) <= 64 else 2)


def _sizes(q_BTHK: Array, v_BTGV: Array, C: int, scale: float, top_k: int, S: int) -> dict:
    """Return the constants of all attention kernels."""
    (_, T, H, K), (G, V) = q_BTHK.shape, v_BTGV.shape[2:]
    sizes = {"T": T, "H": H, "G": G, "K": K, "V": V, "KP": padded(K), "VP": padded(V), "C": C}
    sizes |= {"TOP_K": top_k, "EACH": H // S}
    return sizes | {"LOG2_SCALE": scale * LOG2_E, "PRECISION": precision(q_BTHK.dtype)}


def _forward(
    q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, sel_BTH: Array, *start_BT: Array, C: int, scale: float
) -> tuple[Array, Array]:
    B, T, H, K = q_BTHK.shape
    sel_BNS, top_k = _rows(sel_BTH)
    S = sel_BNS.shape[2]
    n_chunks, sizes = -(-T // C), _sizes(q_BTHK, v_BTGV, C, scale, top_k, S)
    dim, V = max(K, v_BTGV.shape[-1]), v_BTGV.shape[-1]
    fp32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    remote = (q_BTHK, q_BTHK)  # placeholder, not read if there is only one chunk
    if n_chunks > 1:
        NC, tile = n_chunks - 1, tiles("remote", dim, C, q_BTHK.dtype)
        plan = sort_plan.make(sel_BNS, NC)
        blocks = sort_plan.most_items(sort_plan.most_rows(T, C, top_k), NC, tile.m)
        part_dtype = jnp.float32 if sel_BTH.ndim == 3 else v_BTGV.dtype
        remote = runtime.launch(
            attention_kernels.documents_remote_kernel if start_BT else attention_kernels.remote_kernel,
            *(q_BTHK, k_BTGK, v_BTGV, *plan, sort_plan.item_ends(plan, tile.m), *start_BT),
            out_shape=[jax.ShapeDtypeStruct((B, T * top_k, H, V), part_dtype), fp32((B, T * top_k, H))],
            grid=(blocks * B * S,),
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
    o_BTHV, lse_BTH = runtime.launch(
        attention_kernels.documents_local_kernel if start_BT else attention_kernels.local_kernel,
        *(q_BTHK, k_BTGK, v_BTGV, sel_BNS, *remote, *start_BT),
        out_shape=[jax.ShapeDtypeStruct((B, T, H, V), v_BTGV.dtype), fp32((B, T, H))],
        grid=(n_chunks * -(-C // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_local",
        **sizes,
        **({} if start_BT else {"ALL_SELECT": sel_BTH.ndim == 3}),
        AT_ONCE=at_once(top_k, v_BTGV.shape[-1]),
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
    *start_BT: Array,
    C: int,
    scale: float,
) -> tuple[Array, Array, Array]:
    (B, T, H, K), V = q_BTHK.shape, v_BTGV.shape[-1]
    n_chunks = -(-T // C)
    dim, NC = max(K, V), n_chunks - 1
    keys = bwd_keys(dim, C, q_BTHK.dtype)
    pieces = -(-C // keys)
    sel_BNS, top_k = _rows(sel_BTH)
    S = sel_BNS.shape[2]
    sizes = _sizes(q_BTHK, v_BTGV, C, scale, top_k, S) | {"SCALE": scale, "NC": NC, "BLOCK_N": keys, "PIECES": pieces}
    fp32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    D_BTH = jnp.einsum("bthv,bthv->bth", do_BTHV.astype(jnp.float32), o_BTHV.astype(jnp.float32))
    operands = (q_BTHK, k_BTGK, v_BTGV, do_BTHV, LOG2_E * lse_BTH, D_BTH)
    ends_BHc, remote, segments = sel_BNS, (D_BTH, D_BTH, D_BTH), 0  # placeholders for a single chunk, not read
    if n_chunks > 1:
        tile = tiles("remote_bwd", dim, C, q_BTHK.dtype)
        segment = tile.m * tile.n
        plan = sort_plan.make(sel_BNS, NC)
        ends_BHc = sort_plan.item_ends(plan, segment)
        segments = sort_plan.most_items(sort_plan.most_rows(T, C, top_k), NC, segment)
        part_dtype = jnp.float32 if sel_BTH.ndim == 3 else q_BTHK.dtype
        remote = runtime.launch(
            attention_bwd_kernels.documents_remote_bwd_kernel if start_BT else attention_bwd_kernels.remote_bwd_kernel,
            *(*operands, *plan, ends_BHc, *start_BT),
            out_shape=[
                jax.ShapeDtypeStruct((pieces, B, T * top_k, H, K), part_dtype),
                *(fp32((B, S, segments, C, dim)) for dim in (K, V)),
            ],
            grid=(segments * pieces * B * S,),
            num_warps=tile.warps,
            num_stages=tile.stages,
            name="top1_chunk_remote_bwd",
            **sizes,
            NCP=padded(NC),
            SEGMENTS=segments,
            SEGMENT=segment,
            BLOCK_M=tile.m,
        )
    tile = tiles("local_bwd", dim, C, q_BTHK.dtype, several=sel_BTH.ndim > 3)
    dq_dtype = q_BTHK.dtype if pieces == 1 else jnp.float32
    dq_pBTHK, dk_BTGK, dv_BTGV = runtime.launch(
        attention_bwd_kernels.documents_local_bwd_kernel if start_BT else attention_bwd_kernels.local_bwd_kernel,
        *(*operands, sel_BNS, ends_BHc, *remote, *start_BT),
        out_shape=[
            jax.ShapeDtypeStruct((pieces, B, T, H, K), dq_dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BTGK, v_BTGV)),
        ],
        grid=(n_chunks * pieces * B * k_BTGK.shape[2],),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_local_bwd",
        **sizes,
        **({} if start_BT else {"ALL_SELECT": sel_BTH.ndim == 3}),
        AT_ONCE=at_once(top_k, q_BTHK.shape[-1]),
        SEGMENTS=segments,
        BLOCK_M=tile.m,
    )
    dq_BTHK = dq_pBTHK[0] if pieces == 1 else dq_pBTHK.sum(0).astype(q_BTHK.dtype)
    return dq_BTHK, dk_BTGK, dv_BTGV
