"""Chunk selection with interchangeable backends.

With n(i) = floor(i / C) and s_ij = scale q_i . k_j, query i selects one of the full past chunks c < n(i):

    exact          argmax_c logsumexp_{j in c} s_ij
    best_key       argmax_c max_{j in c} s_ij
    best_key_int8  as best_key, with operands rounded to 8 bits (int8.py)
    shortlist      as best_key, among the m past chunks with the largest scores in a cheap table (tables.py)
    approx         argmax_c q_i . mean_{j in c} k_j
    random         argmax_c of a hash of i, the head and c (random_scores.py): a control that reads neither q nor k

With top_k, it selects the k chunks with the largest scores instead of the argmax. With packed documents, a query
selects among the past chunks whose last token is in its document, by their keys in this document (documents.py).
"""

from typing import Any

import jax
from jaxtyping import Array, Float, Int32

from kernels_pallas import backend, numerics, validation
from kernels_pallas.segments import check_segments
from kernels_pallas.select_chunk import mosaic_gpu, tables, triton, xla
from kernels_pallas.select_chunk.interface import ChunkSelection

BACKENDS = (triton.BACKEND, mosaic_gpu.BACKEND, xla.BACKEND)
SELECTIONS = ("exact", "best_key", "best_key_int8", "approx", "shortlist", "random")


def select_chunk(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    *,
    segments: Int32[Array, "B T"] | None = None,
    chunk_size: int = 128,
    selection: str = "exact",
    top_k: int = 1,
    shortlist: int = 4,
    table: str = "mean",
    scale: float | None = None,
    implementation: str | None = None,
) -> Int32[Array, "B T H *k"]:
    """Return the past chunks that every query and head selects.

    Args:
      q_BTHK: queries, fp32, bf16 or fp16 (fp64 under x64); any T >= 1.
      k_BTGK: keys; G divides H, query head h reads key-value head h // (H // G).
      segments: number of each token's document, not decreasing along time; None means one document. Triton has segments
        for exact, best_key and approx, xla for all rules.
      chunk_size: keys per chunk, C.
      selection: "exact" (largest softmax mass), "best_key" (largest single score), "best_key_int8" (best_key with
        queries and keys rounded to 8 bits), "shortlist" (best_key among the chunks that lead a table), "approx"
        (largest q . mean key) or "random" (the same past chunks for any q and k).
      top_k: chunks to select.
      shortlist: for "shortlist": the number of chunks with scored keys, at least top_k.
      table: for "shortlist": "mean" (mean key), "sub_means" (mean keys of 8 equal runs of a chunk) or "mean_eigen"
        (mean key and leading eigenvector of the keys' covariance), as in tables.py.
      scale: factor of the scores; 1 / sqrt(K) when None.
      implementation: None picks the best backend that can run this; a name selects that backend or raises an error.

    Returns:
      sel_BTH int32, -1 in the first chunk, and with segments where no past chunk ends in the query's document. Ties go
      to the smallest chunk. With top_k above 1, sel_BTHk: best chunk first, padded with -1. Not differentiable, because
      the result is an integer.

    Raises:
      ValueError: shapes that disagree, an unknown selection or table, a chunk_size or top_k below 1, a shortlist below
        top_k, "sub_means" with a chunk_size that is not a multiple of 8.
      BackendError: (a ValueError) the selected implementation cannot run this.

    Source: arXiv 2505.18522, Top-1 Chunk (Exact and Approx.); "best_key" is the limit of "exact" for a large scale.
    """
    validation.check_attention(q_BTHK.shape, k_BTGK.shape)
    check_segments(segments, *q_BTHK.shape[:2])
    options = checked_options(chunk_size, selection, top_k, shortlist, table)
    kernels = pick_backend(q_BTHK, k_BTGK, options | has_segments(segments), implementation)
    q_BTHK, k_BTGK = jax.lax.stop_gradient((q_BTHK, k_BTGK))
    packed = {} if segments is None else {"segments_BT": segments}
    return kernels.select(q_BTHK, k_BTGK, scale=numerics.softmax_scale(scale, q_BTHK.shape[-1]), **packed, **options)


def has_segments(segments_BT: Array | None) -> dict[str, Any]:
    """Return the option by which a backend sees that a call has segments."""
    return {} if segments_BT is None else {"has_segments": True}


def checked_options(chunk_size: int, selection: str, top_k: int, shortlist: int, table: str) -> dict[str, Any]:
    """Return the selection options as backends take them.

    The shortlist is included only with selection "shortlist". Raises ValueError for a chunk_size or top_k below 1, an
    unknown selection or table, or a shortlist below top_k.
    """
    validation.check_chunk_size(chunk_size)
    validation.check_choice("selection", selection, SELECTIONS)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}: 1 is Top-1 Chunk, more selects several past chunks")
    options: dict[str, Any] = {"chunk_size": chunk_size, "selection": selection, "top_k": top_k}
    if selection != "shortlist":
        return options
    tables.check(table, chunk_size)
    if shortlist < top_k:
        raise ValueError(f"shortlist={shortlist} is smaller than top_k={top_k}: set shortlist to {top_k} or more")
    return options | {"shortlist": tables.Shortlist(shortlist, table)}


def pick_backend(q_BTHK: Array, k_BTGK: Array, options: dict[str, Any], implementation: str | None) -> ChunkSelection:
    """Return the kernels that select for these operands.

    Raises BackendError if the selected backend cannot run them.
    """
    return backend.pick("select_chunk", BACKENDS, implementation, (q_BTHK, k_BTGK), options)
