"""Chunk selection computed from its definition; the oracle of the tests.

Dense, O(T^2). With n(i) = floor(i / C) and s_ij = scale * q_i . k_j, query i considers the full past chunks c < n(i):

    exact          argmax_c logsumexp_{j in c} s_ij
    best_key       argmax_c max_{j in c} s_ij
    best_key_int8  as best_key, with operands rounded to 8 bits (int8.py)
    approx         argmax_c q_i . mean_{j in c} k_j         (fp32 mean)
    shortlist      as best_key, among the m chunks c < n(i) with the largest scores in a table (tables.py)
    random         argmax_c random_scores(i, head, c)       (random_scores.py)

With segments, c >= s(i) // C as well, and sums, maxima and means cover the readable keys of c (documents.py). With
top_k, it selects the chunks with the k largest scores. Ties go to the smallest chunk. Queries in the first chunk
have no candidate: -1. Source: arXiv 2505.18522, Top-1 Chunk.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.select_chunk import documents, int8, tables
from kernels_pallas.select_chunk.random_scores import random_scores


def chunk_scores(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    *,
    chunk_size: int,
    selection: str = "exact",
    shortlist: int = 4,
    table: str = "mean",
    scale: float | None = None,
    segments_BT: Int32[Array, "B T"] | None = None,
) -> Float[Array, "B T H c"]:
    """Return the scores that the selection maximises, per query and full chunk.

    -inf where the chunk is no candidate or not listed.
    """
    scale = float(q_BTHK.shape[-1] ** -0.5) if scale is None else scale
    if segments_BT is not None:
        k_BTGK = documents.readable_keys(k_BTGK, segments_BT, chunk_size)
    if selection == "best_key_int8":
        q_BTHK, k_BTGK = int8.rounded(q_BTHK, k_BTGK, chunk_size)
        selection = "best_key"
    q_BTHK, k_BTHK = in_one_dtype_per_head(q_BTHK, k_BTGK)
    B, T, H, K = q_BTHK.shape
    n_full = T // chunk_size
    k_BcCHK = k_BTHK[:, : n_full * chunk_size].reshape(B, n_full, chunk_size, H, K)
    is_past_BT1c = jnp.arange(n_full) < jnp.arange(T)[:, None, None] // chunk_size
    readable_BcC = None
    if segments_BT is not None:
        first_BT = documents.starts(segments_BT) // chunk_size
        is_past_BT1c = is_past_BT1c & (jnp.arange(n_full) >= first_BT[..., None, None])
        readable_BcC = documents.readable(segments_BT, chunk_size)[:, :n_full]
    if selection in ("exact", "best_key", "shortlist"):
        s_BTHcC = scale * jnp.einsum("bthk,bcshk->bthcs", q_BTHK, k_BcCHK, precision="highest")
        if readable_BcC is not None:
            s_BTHcC = jnp.where(readable_BcC[:, None, None], s_BTHcC, -jnp.inf)
        score_BTHc = jax.nn.logsumexp(s_BTHcC, axis=-1) if selection == "exact" else s_BTHcC.max(-1)
        if selection == "shortlist":
            readable_Bc1C = None if readable_BcC is None else readable_BcC[:, :, None]
            row_BcHPK = tables.rows(k_BcCHK.swapaxes(2, 3), table, readable_Bc1C)
            x_BTHcP = scale * jnp.einsum("bthk,bchpk->bthcp", q_BTHK, row_BcHPK, precision="highest")
            listed_BTHc = jnp.where(is_past_BT1c, tables.score(x_BTHcP, table), -jnp.inf)
            order_BTHc = jnp.argsort(-listed_BTHc, axis=-1, stable=True)
            rank_BTHc = jnp.argsort(order_BTHc, axis=-1)
            score_BTHc = jnp.where(rank_BTHc < shortlist, score_BTHc, -jnp.inf)
    elif selection == "approx":
        mean_BcHK = k_BcCHK.mean(2)
        if readable_BcC is not None:
            mean_BcHK = k_BcCHK.sum(2) / readable_BcC.sum(2)[..., None, None]
        score_BTHc = jnp.einsum("bthk,bchk->bthc", q_BTHK, mean_BcHK, precision="highest")
    else:
        score_THc = random_scores(jnp.arange(T)[:, None, None], jnp.arange(H)[:, None], jnp.arange(n_full))
        score_BTHc = jnp.broadcast_to(score_THc, (B, T, H, n_full))
    return jnp.where(is_past_BT1c, score_BTHc, -jnp.inf)


def select_chunk(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    *,
    chunk_size: int,
    selection: str = "exact",
    top_k: int = 1,
    shortlist: int = 4,
    table: str = "mean",
    scale: float | None = None,
    segments_BT: Int32[Array, "B T"] | None = None,
) -> Int32[Array, "B T H *k"]:
    """Return the selected chunk of each query, -1 in the first chunk and without a candidate.

    With top_k above 1, [B, T, H, k].
    """
    B, T, H, _ = q_BTHK.shape
    sel_BTHk = jnp.full((B, T, H, top_k), -1, jnp.int32)
    if chunk_size <= T:
        rule = {"selection": selection, "shortlist": shortlist, "table": table, "segments_BT": segments_BT}
        score_BTHc = chunk_scores(q_BTHK, k_BTGK, chunk_size=chunk_size, scale=scale, **rule)
        best_BTHk = jnp.argsort(-score_BTHc, axis=-1, stable=True)[..., :top_k].astype(jnp.int32)
        candidates_BT = jnp.broadcast_to(jnp.arange(T) // chunk_size, (B, T))
        if segments_BT is not None:
            candidates_BT -= documents.starts(segments_BT) // chunk_size
        is_past_BTk = jnp.arange(best_BTHk.shape[-1]) < candidates_BT[..., None]
        sel_BTHk = sel_BTHk.at[..., : best_BTHk.shape[-1]].set(jnp.where(is_past_BTk[:, :, None], best_BTHk, -1))
    return sel_BTHk if top_k > 1 else sel_BTHk[..., 0]


def in_one_dtype_per_head(q_BTHK: Array, *others: Array) -> tuple[Array, ...]:
    """Return all arrays in the accumulation dtype, with one head per query head.

    Keys and values are repeated.
    """
    dtype = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    H = q_BTHK.shape[2]
    repeated = [jnp.repeat(x.astype(dtype), H // x.shape[2], axis=2) for x in others]
    return (q_BTHK.astype(dtype), *repeated)
