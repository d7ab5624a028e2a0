"""Top-1 Chunk decoding in plain XLA (contract in top1_chunk/decode.py).

Per step: one score per chunk (from the table of means, from every key, or a hash), k gathered chunks per query head,
and the own chunk. The softmax is taken over the (k + 1) C scores together.
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.numerics import MASKED, accumulation_dtype
from kernels_pallas.select_chunk.random_scores import random_scores
from kernels_pallas.select_chunk.xla import best_chunks


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
) -> Array:
    """Return o_BHV; there is a table of means for approximate selection alone."""
    B, H, K = q_BHK.shape
    S, G = k_BSGK.shape[1:3]
    C = chunk_size
    acc = accumulation_dtype(q_BHK, k_BSGK)
    q_BGRK = q_BHK.reshape(B, G, H // G, K)
    position = length - 1
    own = position // C
    sel_BGRj = _select(q_BGRK, k_BSGK, position, C, selection, top_k, scale, chunk_mean_BcGK, acc)

    # Remote: each query head's own gather of C rows for each chunk. A selected chunk is full, so the slice never leaves
    # the cache.
    width = min(C, S)
    n_remote = sel_BGRj.shape[-1] * width

    def remote(x_BSGK):
        def gather(x_SK, sel_N):
            return jax.vmap(lambda c: jax.lax.dynamic_slice_in_dim(x_SK, c * C, width))(jnp.maximum(sel_N, 0))

        x_BGNCK = jax.vmap(jax.vmap(gather, in_axes=(1, 0)))(x_BSGK, sel_BGRj.reshape(B, G, -1))
        return x_BGNCK.reshape(B, G, H // G, n_remote, -1)

    is_selected_BGRC = jnp.repeat(sel_BGRj >= 0, width, axis=-1)
    k_BGRCK, v_BGRCV = remote(k_BSGK), remote(v_BSGV)
    remote_BGRC = scale * jnp.einsum("bgrk,bgrck->bgrc", q_BGRK, k_BGRCK, preferred_element_type=acc)
    remote_BGRC = jnp.where(is_selected_BGRC, remote_BGRC, MASKED)

    # Local: near the end of a cache that C does not divide the slice starts early, hence the lower bound.
    start = jnp.minimum(own * C, S - width)
    k_BLGK, v_BLGV = (jax.lax.dynamic_slice_in_dim(x, start, width, axis=1) for x in (k_BSGK, v_BSGV))
    local_BGRL = scale * jnp.einsum("bgrk,blgk->bgrl", q_BGRK, k_BLGK, preferred_element_type=acc)
    s_L = start + jnp.arange(width)
    local_BGRL = jnp.where((s_L >= own * C) & (s_L <= position), local_BGRL, MASKED)

    # the own key is always among them, so no softmax is over masked scores alone
    p_BGRX = jax.nn.softmax(jnp.concatenate([remote_BGRC, local_BGRL], axis=-1), axis=-1).astype(v_BSGV.dtype)
    # slots that were never written may hold anything, and 0 * NaN is NaN
    v_BGRCV = jnp.where(is_selected_BGRC[..., None], v_BGRCV, 0)
    v_BLGV = jnp.where((s_L <= position)[:, None, None], v_BLGV, 0)
    o_BGRV = jnp.einsum("bgrc,bgrcv->bgrv", p_BGRX[..., :n_remote], v_BGRCV, preferred_element_type=acc)
    o_BGRV += jnp.einsum("bgrl,blgv->bgrv", p_BGRX[..., n_remote:], v_BLGV, preferred_element_type=acc)
    return o_BGRV.reshape(B, H, -1).astype(v_BSGV.dtype)


def _select(
    q_BGRK: Array,
    k_BSGK: Array,
    position: Array,
    C: int,
    selection: str,
    top_k: int,
    scale: float,
    mean_BcGK: Array | None,
    acc: jnp.dtype,
) -> Array:
    """Return sel_BGRj: the selected chunks among those before that of `position`; -1 when there are no more."""
    B, G, R, _ = q_BGRK.shape
    n_full, own = k_BSGK.shape[1] // C, position // C
    if n_full == 0:
        return jnp.full_like(q_BGRK[..., :1], -1, dtype=jnp.int32)
    if selection == "random":
        score_GRc = random_scores(position, jnp.arange(G * R).reshape(G, R, 1), jnp.arange(n_full))
        score_BGRc = jnp.broadcast_to(score_GRc, (B, G, R, n_full))
    elif mean_BcGK is None:
        s_BGRS = scale * jnp.einsum("bgrk,bsgk->bgrs", q_BGRK, k_BSGK, preferred_element_type=acc)
        of_chunk = jax.nn.logsumexp if selection == "exact" else jnp.max
        score_BGRc = of_chunk(s_BGRS[..., : n_full * C].reshape(B, G, R, n_full, C), axis=-1)
    else:
        q_BGRK = q_BGRK.astype(mean_BcGK.dtype)
        score_BGRc = jnp.einsum("bgrk,bcgk->bgrc", q_BGRK, mean_BcGK, precision="highest")
    score_BGRc = jnp.where(jnp.arange(n_full) < own, score_BGRc, -jnp.inf)
    best = best_chunks(score_BGRc, min(top_k, n_full))
    return jnp.stack([jnp.where(own <= rank, -1, chunk_BGR) for rank, (_, chunk_BGR) in enumerate(best)], axis=-1)
