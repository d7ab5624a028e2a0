"""Launch the Triton kernels of chunk selection (kernels.py, and documents_kernels.py for packed documents).

Arrays stay [B, T, H, D], and the kernels read them with strides.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.numerics import LOG2_E, score_bound, with_sign
from kernels_pallas.select_chunk import documents, tables
from kernels_pallas.select_chunk.int8 import quantize_keys, quantize_queries
from kernels_pallas.select_chunk.tables import Shortlist
from kernels_pallas.select_chunk.triton import documents_kernels, kernels
from kernels_pallas.select_chunk.triton.tile_sizes import tiles
from kernels_pallas.triton import interpreter, runtime, sort_plan
from kernels_pallas.triton.blocks import padded, precision

SEGMENT_BLOCKS = 4  # row blocks per program, all with the same candidate: its keys are read once
# With at most this many past chunks per list entry, scoring all chunks should be faster than sorting rows by candidate.
# On an H200 a row takes 0.40 ns per candidate and 0.028 ns per chunk, and on average half the chunks are past. The
# threshold was not timed.
FEW_CHUNKS = 24
MOST = jnp.iinfo(jnp.int32).max


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

    The selection is -1 in the first chunk, and with segments where no past chunk ends in the query's document. With
    top_k above 1, return sel_BTHk: best chunk first, padded with -1.
    """
    T = q_BTHK.shape[1]
    k_most = min(top_k, (T - 1) // chunk_size)  # no query has more past chunks
    if k_most == 0:
        return jnp.full((*q_BTHK.shape[:3], top_k) if top_k > 1 else q_BTHK.shape[:3], -1, jnp.int32)
    q, k, sel = "b t (g r) k", "b t g k", "b t (g r) n"
    rule, operands = f"{q}, {k} -> {sel}", (q_BTHK, k_BTGK)
    if segments_BT is not None:
        f = means_in_documents
        if selection != "approx":
            f = partial(keys_in_documents, scale=scale, exact=selection == "exact")
        rule, operands = f"{q}, {k}, b t -> {sel}", (q_BTHK, k_BTGK, documents.starts(segments_BT))
    elif selection == "approx":
        f = by_table
    elif shortlist is not None and not shortlist.holds_all(T, chunk_size):
        f = partial(by_shortlist, shortlist=shortlist, scale=scale)
    else:
        f = partial(exact if selection == "exact" else best_key, scale=scale)
    if selection == "best_key_int8":  # rounded outside `f`: jax-triton 0.4 fails in dead-code elimination
        rule, operands = f"{q}, b s g k, b c g -> {sel}", (quantize_queries(q_BTHK), *quantize_keys(k_BTGK, chunk_size))
    f = partial(f, chunk_size=chunk_size, top_k=k_most)
    sel_BTHk = fold_vmap(f, rule, **heads(q_BTHK, k_BTGK))(*operands)
    if top_k == 1:
        return sel_BTHk[..., 0]
    return jnp.pad(sel_BTHk, ((0, 0), (0, 0), (0, 0), (0, top_k - k_most)), constant_values=-1)


def exact(q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, top_k: int, scale: float) -> Array:
    """Select by softmax mass and return sel_BTHk.

    `top_k` may not exceed the number of past chunks that some query has.
    """
    B, T, H, K = q_BTHK.shape
    q_BTHK, scale = with_sign(q_BTHK, scale), abs(scale) or 1.0
    tile = tiles("exact", K, chunk_size, q_BTHK.dtype)
    ptx = "" if interpreter.is_chosen() else kernels.exponentials(tile.poly, scale * LOG2_E)
    bounded_BH = score_bound(q_BTHK, k_BTGK) * scale * LOG2_E <= kernels.BOUND
    (sel_BTHk,) = runtime.launch(
        kernels.exact_kernel,
        q_BTHK,
        k_BTGK,
        bounded_BH.astype(jnp.int32),
        out_shape=[jax.ShapeDtypeStruct((B, T, H, top_k), jnp.int32)],
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
        TOP_K=top_k,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        LOG2_SCALE=scale * LOG2_E,
        PTX=ptx,
        PRECISION=precision(q_BTHK.dtype),
    )
    return sel_BTHk


def best_key(
    q_BTHK: Array,
    k_BTGK: Array,
    step_BcG: Array | None = None,
    *,
    chunk_size: int,
    top_k: int,
    scale: float,
    chunk_BTHm: Array | None = None,
) -> Array:
    """Select by the largest score and return sel_BTHk.

    Candidates are all past chunks, or `chunk_BTHm` of each query. Only the sign of the scale matters. With `step_BcG`,
    queries and keys are 8-bit integers, and there are only keys of full chunks (int8.py).
    """
    B, T, H, K = q_BTHK.shape
    int8 = step_BcG is not None
    tile = tiles("best_key", K, chunk_size, q_BTHK.dtype)
    (sel_BTHk,) = runtime.launch(
        kernels.best_key_kernel,
        with_sign(q_BTHK, scale),
        k_BTGK,
        step_BcG if int8 else k_BTGK,  # k and q are placeholders here, not read
        q_BTHK if chunk_BTHm is None else chunk_BTHm,
        out_shape=[jax.ShapeDtypeStruct((B, T, H, top_k), jnp.int32)],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_best_key_int8" if int8 else "top1_chunk_best_key",
        T=T,
        TK=k_BTGK.shape[1],
        H=H,
        G=k_BTGK.shape[2],
        K=K,
        KP=max(padded(K), 32 if int8 else 16),  # minimum for 8-bit products
        C=chunk_size,
        LISTED=0 if chunk_BTHm is None else chunk_BTHm.shape[-1],
        TOP_K=top_k,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        INT8=int8,
        PRECISION=precision(q_BTHK.dtype),
    )
    return sel_BTHk


def by_table(
    q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, top_k: int, table: str = "mean", scale: float = 1.0
) -> Array:
    """Select by the largest table scores and return sel_BTHk.

    For chunk means, a positive scale changes nothing.
    """
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    row_BpPcGK = _table_parts(k_BTGK, chunk_size, table, abs(scale))
    tile = tiles("table", K, chunk_size, q_BTHK.dtype)
    (sel_BTHk,) = runtime.launch(
        kernels.table_kernel,
        with_sign(q_BTHK, scale),
        row_BpPcGK,
        out_shape=[jax.ShapeDtypeStruct((B, T, H, top_k), jnp.int32)],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_table",
        T=T,
        H=H,
        G=G,
        K=K,
        KP=padded(K),
        C=chunk_size,
        N_FULL=T // chunk_size,
        PARTS=row_BpPcGK.shape[1],
        ROWS=row_BpPcGK.shape[2],
        SQUARED=table == "mean_eigen",
        TOP_K=top_k,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        PRECISION=precision(q_BTHK.dtype),
    )
    return sel_BTHk


def _table_parts(k_BTGK: Array, C: int, table: str, scale: float = 1.0, readable_BcC: Array | None = None) -> Array:
    """Return each full chunk's table rows, as parts in k's dtype.

    The shape is [B, parts, P, T // C, G, K]. The parts add up to the fp32 rows. Their products with 16-bit queries are
    exact, and faster than fp32 products. mean_eigen's second row is multiplied by the root of the scale: scores are
    then the scores of tables.py, divided by the scale.
    """
    B, T, G, K = k_BTGK.shape
    k_BcCGK = k_BTGK[:, : T // C * C].reshape(B, T // C, C, G, K).astype(jnp.float32)
    if readable_BcC is not None:
        row_BPcGK = jnp.moveaxis(tables.rows(k_BcCGK.swapaxes(2, 3), table, readable_BcC[:, :, None]), 3, 1)
    elif table == "mean_eigen":
        row_BPcGK = jnp.moveaxis(tables.rows(k_BcCGK.swapaxes(2, 3), table), 3, 1)
        row_BPcGK = row_BPcGK.at[:, 1].multiply(scale**0.5)
    else:
        runs = tables.N_ROWS[table]
        row_BPcGK = jnp.moveaxis(k_BcCGK.reshape(B, T // C, runs, C // runs, G, K).mean(3), 2, 1)
    info, parts = jnp.finfo(k_BTGK.dtype), []
    n_parts = {"float32": 1, "float16": 2, "bfloat16": 3}[k_BTGK.dtype.name]
    if table == "sub_means":  # 16 of 24 bits: smaller errors than float32 sums make, with 2/3 of the products
        n_parts = min(n_parts, 2)
    for _ in range(n_parts):
        # XLA may drop a pair of astype conversions and keep the excess precision, hence reduce_precision. It flushes
        # subnormal numbers, and the second float16 part is often subnormal, hence float32's 8 exponent bits.
        parts.append(jax.lax.reduce_precision(row_BPcGK, 8, info.nmant))
        row_BPcGK = row_BPcGK - parts[-1]
    return jnp.stack(parts, axis=1).astype(k_BTGK.dtype)


def by_shortlist(
    q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, top_k: int, shortlist: Shortlist, scale: float
) -> Array:
    """Select by the largest score among the chunks that lead a table.

    Returns sel_BTHk. The list must be shorter than the past.
    """
    (B, T, H, K), G, C, m = q_BTHK.shape, k_BTGK.shape[2], chunk_size, shortlist.size
    chunk_BTHm = by_table(q_BTHK, k_BTGK, chunk_size=C, top_k=m, table=shortlist.table, scale=scale)
    NC, tile = (T - 1) // C, tiles("listed", K, C, q_BTHK.dtype)
    if m * FEW_CHUNKS >= NC:
        return best_key(q_BTHK, k_BTGK, chunk_size=C, top_k=top_k, scale=scale, chunk_BTHm=chunk_BTHm)
    segment = tile.m * SEGMENT_BLOCKS
    plan = sort_plan.make(chunk_BTHm.swapaxes(2, 3).reshape(B, T * m, H), NC)
    segments = sort_plan.most_items(sort_plan.most_rows(T, C, m), NC, segment)
    (top_BHN,) = runtime.launch(
        kernels.listed_kernel,
        with_sign(q_BTHK, scale),
        k_BTGK,
        *plan,
        sort_plan.item_ends(plan, segment),
        out_shape=[jax.ShapeDtypeStruct((B, H, T * m), jnp.float32)],
        grid=(segments * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_listed",
        T=T,
        H=H,
        G=G,
        K=K,
        KP=padded(K),
        C=C,
        LISTED=m,
        NC=NC,
        NCP=padded(NC),
        SEGMENTS=segments,
        SEGMENT=segment,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        PRECISION=precision(q_BTHK.dtype),
    )
    return _best_listed(chunk_BTHm, jnp.moveaxis(top_BHN.reshape(B, H, T, m), 1, 2), top_k)


def keys_in_documents(
    q_BTHK: Array, k_BTGK: Array, start_BT: Array, *, chunk_size: int, top_k: int, scale: float, exact: bool
) -> Array:
    """Select by softmax mass or by the largest score within documents; return sel_BTHk."""
    B, T, H, K = q_BTHK.shape
    q_BTHK, scale = with_sign(q_BTHK, scale), abs(scale) or 1.0
    tile = tiles("exact" if exact else "best_key", K, chunk_size, q_BTHK.dtype)
    (sel_BTHk,) = runtime.launch(
        documents_kernels.documents_keys_kernel,
        q_BTHK,
        k_BTGK,
        start_BT,
        out_shape=[jax.ShapeDtypeStruct((B, T, H, top_k), jnp.int32)],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_documents_exact" if exact else "top1_chunk_documents_best_key",
        T=T,
        H=H,
        G=k_BTGK.shape[2],
        K=K,
        KP=padded(K),
        C=chunk_size,
        TOP_K=top_k,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        LOG2_SCALE=scale * LOG2_E,
        EXACT=exact,
        PRECISION=precision(q_BTHK.dtype),
    )
    return sel_BTHk


def means_in_documents(q_BTHK: Array, k_BTGK: Array, start_BT: Array, *, chunk_size: int, top_k: int) -> Array:
    """Select by the mean of the readable keys and return sel_BTHk."""
    (B, T, H, K), C = q_BTHK.shape, chunk_size
    readable_BcC = jnp.arange(T // C * C).reshape(-1, C) >= start_BT[:, C - 1 : T // C * C : C, None]
    row_Bp1cGK = _table_parts(k_BTGK, C, "mean", readable_BcC=readable_BcC)
    tile = tiles("table", K, C, q_BTHK.dtype)
    (sel_BTHk,) = runtime.launch(
        documents_kernels.documents_table_kernel,
        q_BTHK,
        row_Bp1cGK,
        start_BT,
        out_shape=[jax.ShapeDtypeStruct((B, T, H, top_k), jnp.int32)],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_chunk_documents_table",
        T=T,
        H=H,
        G=k_BTGK.shape[2],
        K=K,
        KP=padded(K),
        C=C,
        N_FULL=T // C,
        PARTS=row_Bp1cGK.shape[1],
        TOP_K=top_k,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        PRECISION=precision(q_BTHK.dtype),
    )
    return sel_BTHk


def _best_listed(chunk_m: Array, top_m: Array, top_k: int) -> Array:
    """Return the chunks with the best scores, [..., k].

    Candidates may be in any order; ties go to the smallest chunk. A candidate of -1 ranks after all chunks, for any
    score.
    """
    top_m, best = jnp.where(chunk_m < 0, -jnp.inf, top_m), []
    for _ in range(top_k):
        is_best_m = top_m == top_m.max(-1, keepdims=True)
        # NaN equals nothing: fall back to the largest past chunk in the list
        best.append(jnp.minimum(jnp.where(is_best_m, chunk_m, MOST).min(-1), chunk_m.max(-1)))
        top_m = jnp.where(chunk_m == best[-1][..., None], -jnp.inf, top_m)
    return jnp.stack(best, axis=-1)
