"""Chunk selection over interchangeable backends.

With n(i) = floor(i / C) and s_ij = scale q_i . k_j, query i selects among the full past chunks c < n(i):

    exact    argmax_c logsumexp_{j in c} s_ij
    best_key argmax_c max_{j in c} s_ij
    approx   argmax_c q_i . mean_{j in c} k_j
    random   argmax_c of a hash of i, the head and c (random_scores.py): a control that reads neither q nor k

With top_k, the k chunks of the largest scores in place of the argmax.
"""

import jax
from jaxtyping import Array, Float, Int32

from kernels_pallas import backend, numerics, validation
from kernels_pallas.select_chunk import mosaic_gpu, triton, xla
from kernels_pallas.select_chunk.interface import ChunkSelection

BACKENDS = (triton.BACKEND, mosaic_gpu.BACKEND, xla.BACKEND)
SELECTIONS = ("exact", "best_key", "approx", "random")


def select_chunk(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    *,
    chunk_size: int = 128,
    selection: str = "exact",
    top_k: int = 1,
    scale: float | None = None,
    implementation: str | None = None,
) -> Int32[Array, "B T H *k"]:
    """Return the chunk, or the `top_k` chunks, that every query and head selects among its full past chunks.

    Args:
      q_BTHK: queries, fp32, bf16 or fp16 (fp64 under x64); any T >= 1.
      k_BTGK: keys; G divides H, query head h reads key-value head h // (H // G).
      chunk_size: keys per chunk, C.
      selection: "exact" (largest softmax mass), "best_key" (largest score of one key), "approx" (largest
        q . mean key) or "random" (the same past chunks for any q and k).
      top_k: chunks to select.
      scale: of the scores; 1 / sqrt(K) when None.
      implementation: None picks the best backend that can run this; a name gets that one or an error.

    Returns:
      sel_BTH, -1 in the first chunk; ties go to the smallest chunk. With a top_k above 1, sel_BTHk: the best chunk
      first, -1 where there are fewer past chunks. Not differentiable: the result is an integer.

    Raises:
      ValueError: shapes that disagree, an unknown selection, a chunk_size or top_k below 1.
      BackendError: (a ValueError) the named implementation cannot run this.

    Source: arXiv 2505.18522, Top-1 Chunk (Exact and Approx.); "best_key" is the limit of "exact" for a large scale.
    """
    validation.check_attention(q_BTHK.shape, k_BTGK.shape)
    check_options(chunk_size, selection, top_k)
    options = {"chunk_size": chunk_size, "selection": selection, "top_k": top_k}
    kernels = pick_backend(q_BTHK, k_BTGK, implementation=implementation, **options)
    q_BTHK, k_BTGK = jax.lax.stop_gradient((q_BTHK, k_BTGK))
    return kernels.select(q_BTHK, k_BTGK, scale=numerics.softmax_scale(scale, q_BTHK.shape[-1]), **options)


def check_options(chunk_size: int, selection: str, top_k: int) -> None:
    """Raise ValueError unless the chunk has a key, the selection is known, and it selects at least one chunk."""
    validation.check_chunk_size(chunk_size)
    validation.check_choice("selection", selection, SELECTIONS)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}: 1 is Top-1 Chunk, more selects several past chunks")


def pick_backend(
    q_BTHK: Array, k_BTGK: Array, *, chunk_size: int, selection: str, top_k: int, implementation: str | None
) -> ChunkSelection:
    """Return the kernels that select for these operands; raises BackendError when the named ones cannot."""
    options = {"chunk_size": chunk_size, "selection": selection, "top_k": top_k}
    return backend.pick("select_chunk", BACKENDS, implementation, (q_BTHK, k_BTGK), options)
