"""Launch the Triton kernels of Top-1 Chunk decoding.

Contract: top1_chunk/decode.py. Memory bandwidth limits a step. exact and best_key read every cached key once, approx
reads the table of means, and a shortlist reads its table and the keys of m chunks. Then each rule reads (k + 1) C keys
and values. `length` stays on the device. The kernels read one length per batch entry, although the op passes the same
for all.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.numerics import LOG2_E
from kernels_pallas.select_chunk.tables import Shortlist
from kernels_pallas.top1_chunk.triton import decode_kernels as kernels
from kernels_pallas.triton import runtime
from kernels_pallas.triton.blocks import padded, precision, splits

# Bytes of keys being copied to shared memory, per program; three programs then fit one multiprocessor of an A100.
IN_FLIGHT = 48 * 1024
CHUNKS_PER_SPLIT = 128  # minimal chunks of a table per split


def decode(
    q_BHK: Array,
    k_BSGK: Array,
    v_BSGV: Array,
    length: Array,
    *,
    chunk_size: int,
    selection: str,
    top_k: int = 1,
    scale: float,
    chunk_mean_BcGK: Array | None,
    shortlist: Shortlist | None = None,
    chunk_table_BcGPK: Array | None = None,
) -> Array:
    """Return o_BHV.

    Pass `chunk_mean_BcGK` only with "approx", and `shortlist` and `chunk_table_BcGPK` only with "shortlist".
    """
    length_B = jnp.broadcast_to(length, q_BHK.shape[:1])
    if shortlist is not None and shortlist.holds_all(k_BSGK.shape[1], chunk_size):
        shortlist = chunk_table_BcGPK = None  # equals best_key
    tables = [x for x in (chunk_table_BcGPK, chunk_mean_BcGK) if x is not None]
    row = ", b c g p k" if shortlist is not None else ", b c g k" if tables else ""
    rule = f"b (g r) k, b s g k, b s g v, b{row} -> b (g r) v"
    one = partial(_decode, C=chunk_size, by_mass=selection == "exact", top_k=top_k, scale=scale, shortlist=shortlist)
    f = fold_vmap(one, rule, **heads(q_BHK[:, None], k_BSGK))
    return f(q_BHK, k_BSGK, v_BSGV, length_B, *tables)


def _decode(
    q_BHK: Array,
    k_BSGK: Array,
    v_BSGV: Array,
    length_B: Array,
    *tables: Array,
    C: int,
    by_mass: bool,
    top_k: int,
    scale: float,
    shortlist: Shortlist | None,
) -> Array:
    (B, H, K), (S, G) = q_BHK.shape, k_BSGK.shape[1:3]
    V, log2_scale, n_past = v_BSGV.shape[-1], scale * LOG2_E, (S - 1) // C
    top_k = max(1, min(top_k, n_past))  # no query has more past chunks
    sizes = {"S": S, "H": H, "G": G, "K": K, "KP": padded(K), "C": C, "LOG2_SCALE": log2_scale}
    if n_past == 0:
        score_BHn, chunk_BHn = jnp.full((B, H, 1), -jnp.inf), jnp.full((B, H, 1), -1, jnp.int32)
    elif tables:
        listed = top_k if shortlist is None else shortlist.size
        score_BHn, chunk_BHn = _by_table(q_BHK, tables[0], length_B, C, listed, scale, shortlist)
        if shortlist is not None:
            score_BHn, chunk_BHn = runtime.launch(
                kernels.listed_kernel,
                q_BHK,
                k_BSGK,
                score_BHn,
                chunk_BHn,
                out_shape=_candidates(B, H, listed),
                grid=(B * H * listed,),
                name="top1_chunk_decode_listed",
                **sizes,
                N=score_BHn.shape[-1],
                NP=padded(score_BHn.shape[-1]),
                LISTED=listed,
                BLOCK=min(64, padded(C)),
            )
    else:
        n_splits = splits(B * G, S // C, least=4)
        tile_bytes = padded(C) * padded(K) * k_BSGK.dtype.itemsize
        score_BHn, chunk_BHn = runtime.launch(
            kernels.every_key_kernel,
            q_BHK,
            k_BSGK,
            length_B,
            out_shape=_candidates(B, H, n_splits * top_k),
            grid=(B * G * n_splits,),
            num_stages=max(2, min(4, 1 + IN_FLIGHT // tile_bytes)),
            name=f"top1_chunk_decode_{'exact' if by_mass else 'best_key'}",
            **sizes,
            RP=padded(H // G),
            CP=padded(C),
            SPLITS=n_splits,
            TOP_K=top_k,
            BY_MASS=by_mass,
            PRECISION=precision(k_BSGK.dtype),
        )
    (o_BHV,) = runtime.launch(
        kernels.attend_kernel,
        q_BHK,
        k_BSGK,
        v_BSGV,
        length_B,
        score_BHn,
        chunk_BHn,
        out_shape=[jax.ShapeDtypeStruct((B, H, V), v_BSGV.dtype)],
        grid=(B * H,),
        name="top1_chunk_decode_attend",
        **sizes,
        V=V,
        VP=padded(V),
        N=score_BHn.shape[-1],
        NP=padded(score_BHn.shape[-1]),
        TOP_K=top_k,
        BLOCK=min(64, padded(C)),
    )
    return o_BHV


def _by_table(
    q_BHK: Array, table: Array, length_B: Array, C: int, count: int, scale: float, shortlist: Shortlist | None
) -> tuple[Array, ...]:
    """Return the best chunks of every split by their table scores.

    The table has means [B, c, G, K], or a shortlist's rows [B, c, G, P, K].
    """
    (B, H, K), (n_full, G) = q_BHK.shape, table.shape[1:3]
    n_splits = splits(B * H, n_full, least=CHUNKS_PER_SPLIT)
    return runtime.launch(
        kernels.table_kernel,
        q_BHK,
        table,
        length_B,
        out_shape=_candidates(B, H, n_splits * count),
        grid=(B * H * n_splits,),
        num_stages=3,
        name="top1_chunk_decode_table",
        N_FULL=n_full,
        H=H,
        G=G,
        ROWS=1 if shortlist is None else table.shape[3],
        K=K,
        KP=padded(K),
        C=C,
        SPLITS=n_splits,
        TOP_K=count,
        SCALE=1.0 if shortlist is None else scale,  # a positive scale does not change the order of means
        SQUARED=shortlist is not None and shortlist.table == "mean_eigen",
        BLOCK=32,
    )


def _candidates(B: int, H: int, n: int) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of scores and chunks, n candidates per head."""
    return [jax.ShapeDtypeStruct((B, H, n), dtype) for dtype in (jnp.float32, jnp.int32)]
