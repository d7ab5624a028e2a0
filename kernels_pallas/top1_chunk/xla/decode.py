"""Top-1 Chunk decoding in plain XLA (contract in top1_chunk/decode.py).

A step computes one score per chunk (from the table of means, from every key, or from a hash), gathers k chunks per
query head, and slices the local chunk. For a shortlist it first gathers the listed chunks to score their keys. One
softmax covers the (k + 1) C scores.
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.numerics import MASKED, accumulation_dtype
from kernels_pallas.select_chunk import int8, tables
from kernels_pallas.select_chunk.random_scores import random_scores
from kernels_pallas.select_chunk.tables import Shortlist
from kernels_pallas.select_chunk.xla import best_chunks, best_of_shortlist


def decode(
    q_BHK: Array,
    k_BSGK: Array,
    v_BSGV: Array,
    length: Array,
    *,
    chunk_size: int,
    selection: str,
    top_k: int,
    scale: float,
    chunk_mean_BcGK: Array | None,
    shortlist: Shortlist | None = None,
    chunk_table_BcGPK: Array | None = None,
) -> Array:
    """Return o_BHV.

    Pass `chunk_mean_BcGK` only with "approx", and `shortlist` and `chunk_table_BcGPK` only with "shortlist".
    """
    B, H, K = q_BHK.shape
    S, G = k_BSGK.shape[1:3]
    C = chunk_size
    acc = accumulation_dtype(q_BHK, k_BSGK)
    q_BGRK = q_BHK.reshape(B, G, H // G, K)
    position = length - 1
    own = position // C
    sel_BGRj = _select(
        q_BGRK, k_BSGK, position, C, selection, top_k, scale, chunk_mean_BcGK, shortlist, chunk_table_BcGPK
    )

    # Remote: each query head gathers C rows per chunk.
    width = min(C, S)
    n_remote = sel_BGRj.shape[-1] * width
    is_selected_BGRC = jnp.repeat(sel_BGRj >= 0, width, axis=-1)
    k_BGRCK, v_BGRCV = _gather(k_BSGK, sel_BGRj, C, width), _gather(v_BSGV, sel_BGRj, C, width)
    remote_BGRC = scale * jnp.einsum("bgrk,bgrck->bgrc", q_BGRK, k_BGRCK, preferred_element_type=acc)
    remote_BGRC = jnp.where(is_selected_BGRC, remote_BGRC, MASKED)

    # Local: if C does not divide S, the slice starts early near the end of the cache, hence the lower bound.
    start = jnp.minimum(own * C, S - width)
    k_BLGK, v_BLGV = (jax.lax.dynamic_slice_in_dim(x, start, width, axis=1) for x in (k_BSGK, v_BSGV))
    local_BGRL = scale * jnp.einsum("bgrk,blgk->bgrl", q_BGRK, k_BLGK, preferred_element_type=acc)
    s_L = start + jnp.arange(width)
    local_BGRL = jnp.where((s_L >= own * C) & (s_L <= position), local_BGRL, MASKED)

    # the newest key is never masked, so no softmax has only masked scores
    p_BGRX = jax.nn.softmax(jnp.concatenate([remote_BGRC, local_BGRL], axis=-1), axis=-1).astype(v_BSGV.dtype)
    # slots that were never written may hold NaN, and 0 * NaN is NaN
    v_BGRCV = jnp.where(is_selected_BGRC[..., None], v_BGRCV, 0)
    v_BLGV = jnp.where((s_L <= position)[:, None, None], v_BLGV, 0)
    o_BGRV = jnp.einsum("bgrc,bgrcv->bgrv", p_BGRX[..., :n_remote], v_BGRCV, preferred_element_type=acc)
    o_BGRV += jnp.einsum("bgrl,blgv->bgrv", p_BGRX[..., n_remote:], v_BLGV, preferred_element_type=acc)
    return o_BGRV.reshape(B, H, -1).astype(v_BSGV.dtype)


def _gather(x_BSGK: Array, chunk_BGRj: Array, C: int, width: int) -> Array:
    """Return the keys of each query head's chunks, [B, G, R, j * width, K].

    -1 gives chunk 0. A past chunk is full, so no slice leaves the cache.
    """

    def gather(x_SK, chunk_N):
        return jax.vmap(lambda c: jax.lax.dynamic_slice_in_dim(x_SK, c * C, width))(jnp.maximum(chunk_N, 0))

    B, G, R, j = chunk_BGRj.shape
    x_BGNCK = jax.vmap(jax.vmap(gather, in_axes=(1, 0)))(x_BSGK, chunk_BGRj.reshape(B, G, -1))
    return x_BGNCK.reshape(B, G, R, j * width, -1)


def _select(
    q_BGRK: Array,
    k_BSGK: Array,
    position: Array,
    C: int,
    selection: str,
    top_k: int,
    scale: float,
    mean_BcGK: Array | None,
    shortlist: Shortlist | None,
    table_BcGPK: Array | None,
) -> Array:
    """Return sel_BGRj, the selected chunks before the chunk of `position`.

    Padded with -1 if there are fewer.
    """
    B, G, R, _ = q_BGRK.shape
    S, own = k_BSGK.shape[1], position // C
    n_full, acc = S // C, accumulation_dtype(q_BGRK, k_BSGK)
    if n_full == 0:
        return jnp.full_like(q_BGRK[..., :1], -1, dtype=jnp.int32)

    def first(score_BGRc: Array, count: int) -> Array:
        score_BGRc = jnp.where(jnp.arange(n_full) < own, score_BGRc, -jnp.inf)
        best = best_chunks(score_BGRc, min(count, n_full))
        return jnp.stack([jnp.where(own <= rank, -1, chunk_BGR) for rank, (_, chunk_BGR) in enumerate(best)], axis=-1)

    if selection == "random":
        score_GRc = random_scores(position, jnp.arange(G * R).reshape(G, R, 1), jnp.arange(n_full))
        return first(jnp.broadcast_to(score_GRc, (B, G, R, n_full)), top_k)
    if mean_BcGK is not None:
        q_BGRK = q_BGRK.astype(mean_BcGK.dtype)
        return first(jnp.einsum("bgrk,bcgk->bgrc", q_BGRK, mean_BcGK, precision="highest"), top_k)
    if shortlist is None or table_BcGPK is None or shortlist.holds_all(S, C):
        if selection == "best_key_int8":
            q_BGRK, k_BSGK = int8.rounded(q_BGRK, k_BSGK, C)
        s_BGRS = scale * jnp.einsum("bgrk,bsgk->bgrs", q_BGRK, k_BSGK, preferred_element_type=acc)
        of_chunk = jax.nn.logsumexp if selection == "exact" else jnp.max
        return first(of_chunk(s_BGRS[..., : n_full * C].reshape(B, G, R, n_full, C), axis=-1), top_k)
    wide_BGRK = q_BGRK.astype(table_BcGPK.dtype)
    x_BGRcP = scale * jnp.einsum("bgrk,bcgpk->bgrcp", wide_BGRK, table_BcGPK, precision="highest")
    chunk_BGRm = jnp.sort(first(tables.score(x_BGRcP, shortlist.table), shortlist.size), axis=-1)
    k_BGRMK = _gather(k_BSGK, chunk_BGRm, C, C)
    s_BGRM = scale * jnp.einsum("bgrk,bgrmk->bgrm", q_BGRK, k_BGRMK, preferred_element_type=acc)
    best_BGRm = jnp.where(chunk_BGRm < 0, -jnp.inf, s_BGRM.reshape(*chunk_BGRm.shape, C).max(-1))
    return jnp.stack(best_of_shortlist(chunk_BGRm, best_BGRm, top_k), axis=-1)
