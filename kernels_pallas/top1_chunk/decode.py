"""Top-1 Chunk attention for one new token against a cache; equals the parallel form at every position.

The caches have a static length S, `length` says how many of their tokens are real, the new one included.
"exact" and "best_key" score every cached key; "approx" scores a mean key per chunk, kept in a table by
`update_chunk_means` (S / C rows). A step then reads only the table, the selected chunks and the local chunk; "random"
needs no table. Source: arXiv 2505.18522, Top-1 Chunk.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import backend, numerics, validation
from kernels_pallas.select_chunk.api import check_options
from kernels_pallas.top1_chunk import triton, xla

BACKENDS = (triton.DECODE_BACKEND, xla.DECODE_BACKEND)


def top1_chunk_decode(
    q_BHK: Float[Array, "B H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGV: Float[Array, "B S G V"],
    length: Int[Array, ""] | int,
    *,
    chunk_size: int = 128,
    selection: str = "exact",
    top_k: int = 1,
    scale: float | None = None,
    chunk_mean_BcGK: Float[Array, "B c G K"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B H V"]:
    """Return the attention of the newest token, position length - 1, whose key and value are in the caches already.

    Args:
      q_BHK: the newest token's queries.
      k_BSGK: key cache; slots from `length` on are never read into the result.
      v_BSGV: value cache.
      length: tokens in the cache, 1 <= length <= S; an int or an int scalar, may be traced.
      chunk_size: as in `top1_chunk_attention`, like `selection`, `top_k` and `scale`.
      selection: "exact", "best_key", "approx" or "random".
      top_k: past chunks that the query reads.
      scale: of the scores; 1 / sqrt(K) when None.
      chunk_mean_BcGK: for "approx": mean key per chunk, at least S // C rows (`chunk_means`,
        `update_chunk_means`). Made from the cache when None, which reads all of it.
      implementation: as in `top1_chunk_attention`.

    Returns:
      o_BHV in v's dtype.

    Raises:
      ValueError: shapes that disagree, a table with too few rows, an unknown selection, a chunk_size or top_k below 1.
      BackendError: (a ValueError) the named implementation cannot run this.

    Source: arXiv 2505.18522, Top-1 Chunk.
    """
    validation.check_decode(q_BHK.shape, k_BSGK.shape, v_BSGV.shape)
    check_options(chunk_size, selection, top_k)
    B, S, G, K = k_BSGK.shape
    n_full = S // chunk_size
    if selection == "approx" and chunk_mean_BcGK is None:
        chunk_mean_BcGK = chunk_means(k_BSGK, chunk_size=chunk_size)
    if chunk_mean_BcGK is not None:
        rows = chunk_mean_BcGK.shape[1]
        if chunk_mean_BcGK.shape != (B, rows, G, K) or rows < n_full:
            raise ValueError(
                f"chunk_mean must be [{B}, at least {n_full}, {G}, {K}] for a cache of {S} keys in chunks of "
                f"{chunk_size}; got {tuple(chunk_mean_BcGK.shape)}"
            )
        chunk_mean_BcGK = chunk_mean_BcGK[:, :n_full]
    options = {"chunk_size": chunk_size, "selection": selection, "top_k": top_k}
    kernels = backend.pick("top1_chunk_decode", BACKENDS, implementation, (q_BHK, k_BSGK, v_BSGV), options)
    return kernels.decode(
        q_BHK,
        k_BSGK,
        v_BSGV,
        jnp.asarray(length, jnp.int32),
        scale=numerics.softmax_scale(scale, K),
        chunk_mean_BcGK=chunk_mean_BcGK if selection == "approx" else None,
        **options,
    )


def chunk_means(k_BSGK: Float[Array, "B S G K"], *, chunk_size: int) -> Float[Array, "B c G K"]:
    """Return the mean key of each full chunk of a cache, fp32, [B, S // C, G, K]: the table after a prefill.

    Rows of chunks that are not complete yet hold garbage; no query selects them before `update_chunk_means`
    completes them.
    """
    validation.check_chunk_size(chunk_size)
    B, S, G, K = k_BSGK.shape
    n_full = S // chunk_size
    k_BcCGK = k_BSGK[:, : n_full * chunk_size].reshape(B, n_full, chunk_size, G, K)
    return k_BcCGK.astype(numerics.accumulation_dtype(k_BSGK)).mean(2)


def update_chunk_means(
    chunk_mean_BcGK: Float[Array, "B c G K"],
    k_BSGK: Float[Array, "B S G K"],
    length: Int[Array, ""] | int,
    *,
    chunk_size: int,
) -> Float[Array, "B c G K"]:
    """Return the table after the token at length - 1 was written to the key cache: its chunk's row is refreshed.

    Reads that chunk only. The row is right once the chunk is complete; before that no query can select it.
    """
    validation.check_chunk_size(chunk_size)
    if chunk_mean_BcGK.shape[1] == 0:  # the cache is shorter than a chunk
        return chunk_mean_BcGK
    own = (jnp.asarray(length, jnp.int32) - 1) // chunk_size
    k_BCGK = jnp.take(k_BSGK, own * chunk_size + jnp.arange(chunk_size), axis=1, mode="fill", fill_value=0)
    mean_BGK = k_BCGK.astype(chunk_mean_BcGK.dtype).mean(1)
    # a trailing chunk that the cache cannot complete has no row
    return chunk_mean_BcGK.at[:, own].set(mean_BGK, mode="drop")
