"""Top-1 Chunk decoding in Triton (contract in top1_chunk/decode.py, kernels in decode_kernels.py).

A step is bound by memory: exact and best_key read every key of the cache once, approx the table of means, all then 2 C
keys and values. `length` stays on the device; one per batch entry would do, since the kernels read it per entry.
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

# Bytes of keys on their way into shared memory, per program: three programs then fit a multiprocessor of an A100.
IN_FLIGHT = 48 * 1024
MEANS_PER_SPLIT = 128


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
    """Return o_BHV; there is a table of means for approximate selection alone."""
    assert (top_k, shortlist, chunk_table_BcGPK) == (1, None, None), (top_k, shortlist)
    length_B = jnp.broadcast_to(length, q_BHK.shape[:1])
    tables = () if chunk_mean_BcGK is None else (chunk_mean_BcGK,)
    rule = f"b (g r) k, b s g k, b s g v, b{', b c g k' if tables else ''} -> b (g r) v"
    one = partial(_decode, chunk_size=chunk_size, selection=selection, scale=scale)
    f = fold_vmap(one, rule, **heads(q_BHK[:, None], k_BSGK))
    return f(q_BHK, k_BSGK, v_BSGV, length_B, *tables)


def _decode(
    q_BHK: Array,
    k_BSGK: Array,
    v_BSGV: Array,
    length_B: Array,
    *tables: Array,
    chunk_size: int,
    selection: str,
    scale: float,
) -> Array:
    (B, H, K), (S, G) = q_BHK.shape, k_BSGK.shape[1:3]
    C, V = chunk_size, v_BSGV.shape[-1]
    n_full = max(1, S // C)
    log2_scale = scale * LOG2_E
    if tables:
        n_splits = splits(B * H, n_full, least=MEANS_PER_SPLIT)
    else:
        n_splits = splits(B * G, n_full, least=4)
    out_shape = [jax.ShapeDtypeStruct((B, H, n_splits), dtype) for dtype in (jnp.float32, jnp.int32)]
    if tables and tables[0].shape[1] > 0:
        score_BHs, chunk_BHs = runtime.launch(
            kernels.approx_kernel,
            q_BHK,
            tables[0],
            length_B,
            out_shape=out_shape,
            grid=(B * H * n_splits,),
            num_stages=3,
            name="top1_chunk_decode_approx",
            ROWS=tables[0].shape[1],
            H=H,
            G=G,
            K=K,
            KP=padded(K),
            C=C,
            SPLITS=n_splits,
            BLOCK=32,
        )
    elif n_full * C > S:  # the cache is shorter than a chunk
        score_BHs, chunk_BHs = jnp.full(out_shape[0].shape, -jnp.inf), jnp.full(out_shape[1].shape, -1, jnp.int32)
    else:
        tile_bytes = padded(C) * padded(K) * k_BSGK.dtype.itemsize
        score_BHs, chunk_BHs = runtime.launch(
            kernels.every_key_kernel,
            q_BHK,
            k_BSGK,
            length_B,
            out_shape=out_shape,
            grid=(B * G * n_splits,),
            num_stages=max(2, min(4, 1 + IN_FLIGHT // tile_bytes)),
            name=f"top1_chunk_decode_{selection}",
            S=S,
            H=H,
            G=G,
            K=K,
            KP=padded(K),
            RP=padded(H // G),
            C=C,
            CP=padded(C),
            SPLITS=n_splits,
            LOG2_SCALE=log2_scale,
            BY_MASS=selection == "exact",
            PRECISION=precision(k_BSGK.dtype),
        )
    (o_BHV,) = runtime.launch(
        kernels.attend_kernel,
        q_BHK,
        k_BSGK,
        v_BSGV,
        length_B,
        score_BHs,
        chunk_BHs,
        out_shape=[jax.ShapeDtypeStruct((B, H, V), v_BSGV.dtype)],
        grid=(B * H,),
        name="top1_chunk_decode_attend",
        S=S,
        H=H,
        G=G,
        K=K,
        V=V,
        KP=padded(K),
        VP=padded(V),
        C=C,
        SPLITS=n_splits,
        SPLITS_P=padded(n_splits),
        LOG2_SCALE=log2_scale,
        BLOCK=min(64, padded(C)),
    )
    return o_BHV
