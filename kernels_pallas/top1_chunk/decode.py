"""Top-1 Chunk attention for one new token against a cache.

The result equals the parallel form at every position. Caches have a static length S; `length` is the number of valid
tokens, including the new token. The keys that a step reads depend on the rule:

    exact, best_key  every cached key
    best_key_int8    every cached key, rounded to 8 bits in every step
    approx           one mean key per chunk, from a table of S / C rows that `update_chunk_means` maintains
    shortlist        a table that `update_chunk_table` maintains, and the keys of the listed chunks
    random           none

Every rule then reads the selected chunks and the local chunk. Source: arXiv 2505.18522, Top-1 Chunk.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import backend, numerics, validation
from kernels_pallas.select_chunk import tables
from kernels_pallas.select_chunk.api import checked_options
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
    shortlist: int = 4,
    table: str = "mean",
    scale: float | None = None,
    chunk_mean_BcGK: Float[Array, "B c G K"] | None = None,
    chunk_table_BcGPK: Float[Array, "B c G P K"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B H V"]:
    """Return the newest token's attention; its key and value are already cached.

    The newest token is at position length - 1.

    Args:
      q_BHK: the newest token's queries.
      k_BSGK: key cache; slots from `length` on do not affect the result.
      v_BSGV: value cache.
      length: tokens in the cache, 1 <= length <= S; an int or an int scalar, may be traced.
      chunk_size: as in `top1_chunk_attention`, like `selection`, `top_k`, `shortlist`, `table` and `scale`.
      selection: "exact", "best_key", "best_key_int8", "approx", "shortlist" or "random".
      top_k: past chunks that the query reads.
      shortlist: for "shortlist": the number of chunks with scored keys.
      table: for "shortlist": "mean", "sub_means" or "mean_eigen".
      scale: factor of the scores; 1 / sqrt(K) when None.
      chunk_mean_BcGK: for "approx": mean key per chunk, at least S // C rows (`chunk_means`, `update_chunk_means`).
        None computes it from the cache, which reads every key.
      chunk_table_BcGPK: the same for "shortlist" (`chunk_table`, `update_chunk_table`).
      implementation: as in `top1_chunk_attention`.

    Returns:
      o_BHV in v's dtype.

    Raises:
      ValueError: shapes that disagree, a table with too few rows, and settings that `select_chunk` refuses.
      BackendError: (a ValueError) the selected implementation cannot run this.

    Source: arXiv 2505.18522, Top-1 Chunk.
    """
    validation.check_decode(q_BHK.shape, k_BSGK.shape, v_BSGV.shape)
    options = checked_options(chunk_size, selection, top_k, shortlist, table)
    if selection == "approx" and chunk_mean_BcGK is None:
        chunk_mean_BcGK = chunk_means(k_BSGK, chunk_size=chunk_size)
    if selection == "shortlist" and chunk_table_BcGPK is None:
        chunk_table_BcGPK = chunk_table(k_BSGK, chunk_size=chunk_size, table=table)
    G, K = k_BSGK.shape[2:]
    if chunk_mean_BcGK is not None:
        chunk_mean_BcGK = _of_full_chunks("chunk_mean", chunk_mean_BcGK, (G, K), k_BSGK, chunk_size)
    if chunk_table_BcGPK is not None:
        size = (G, tables.N_ROWS[table], K)
        chunk_table_BcGPK = _of_full_chunks("chunk_table", chunk_table_BcGPK, size, k_BSGK, chunk_size)
    kernels = backend.pick("top1_chunk_decode", BACKENDS, implementation, (q_BHK, k_BSGK, v_BSGV), options)
    return kernels.decode(
        q_BHK,
        k_BSGK,
        v_BSGV,
        jnp.asarray(length, jnp.int32),
        scale=numerics.softmax_scale(scale, K),
        chunk_mean_BcGK=chunk_mean_BcGK if selection == "approx" else None,
        **({"chunk_table_BcGPK": chunk_table_BcGPK} if selection == "shortlist" else {}),
        **options,
    )


def _of_full_chunks(name: str, table_Bc: Array, size: tuple, k_BSGK: Array, chunk_size: int) -> Array:
    """Return the table rows of the cache's full chunks.

    Raises ValueError for too few rows, or rows of the wrong size.
    """
    B, S = k_BSGK.shape[:2]
    n_full = S // chunk_size
    if table_Bc.shape[0] != B or table_Bc.shape[1] < n_full or table_Bc.shape[2:] != size:
        raise ValueError(
            f"{name} must be [{B}, at least {n_full}, {', '.join(map(str, size))}] for a cache of {S} keys in chunks "
            f"of {chunk_size}; got {tuple(table_Bc.shape)}"
        )
    return table_Bc[:, :n_full]


def chunk_means(k_BSGK: Float[Array, "B S G K"], *, chunk_size: int) -> Float[Array, "B c G K"]:
    """Return the mean key of each full chunk of a cache, fp32 [B, S // C, G, K].

    This is `chunk_table` for "approx".
    """
    return chunk_table(k_BSGK, chunk_size=chunk_size, table="mean")[..., 0, :]


def update_chunk_means(
    chunk_mean_BcGK: Float[Array, "B c G K"],
    k_BSGK: Float[Array, "B S G K"],
    length: Int[Array, ""] | int,
    *,
    chunk_size: int,
) -> Float[Array, "B c G K"]:
    """Return the means after the token at length - 1 was written to the key cache.

    See `update_chunk_table`.
    """
    table_BcG1K = chunk_mean_BcGK[..., None, :]
    return update_chunk_table(table_BcG1K, k_BSGK, length, chunk_size=chunk_size, table="mean")[..., 0, :]


def chunk_table(k_BSGK: Float[Array, "B S G K"], *, chunk_size: int, table: str) -> Float[Array, "B c G P K"]:
    """Return the table of each full chunk of a cache, fp32 [B, S // C, G, P, K].

    Use it after a prefill. "mean" has P = 1 row, "sub_means" 8 and "mean_eigen" 2. Rows of incomplete chunks hold
    garbage; no query selects these chunks before `update_chunk_table` completes them.
    """
    tables.check(table, chunk_size)
    B, S, G, K = k_BSGK.shape
    n_full = S // chunk_size
    k_BcCGK = k_BSGK[:, : n_full * chunk_size].reshape(B, n_full, chunk_size, G, K)
    return tables.rows(k_BcCGK.swapaxes(2, 3), table)


def update_chunk_table(
    chunk_table_BcGPK: Float[Array, "B c G P K"],
    k_BSGK: Float[Array, "B S G K"],
    length: Int[Array, ""] | int,
    *,
    chunk_size: int,
    table: str,
) -> Float[Array, "B c G P K"]:
    """Return the table after the token at length - 1 was written to the key cache.

    Refreshes the rows of the token's chunk and reads only that chunk. The rows are valid once the chunk is complete; no
    query can select it earlier.
    """
    tables.check(table, chunk_size)
    if chunk_table_BcGPK.shape[1] == 0:  # the cache is shorter than a chunk
        return chunk_table_BcGPK
    length = jnp.asarray(length, jnp.int32)
    own = (length - 1) // chunk_size

    def refresh(table_BcGPK: Array) -> Array:
        k_BCGK = jnp.take(k_BSGK, own * chunk_size + jnp.arange(chunk_size), axis=1, mode="fill", fill_value=0)
        row_BGPK = tables.rows(k_BCGK.swapaxes(1, 2), table).astype(table_BcGPK.dtype)
        # an incomplete chunk at the end of the cache has no row
        return table_BcGPK.at[:, own].set(row_BGPK, mode="drop")

    if table != "mean_eigen":  # means cost less than a branch
        return refresh(chunk_table_BcGPK)
    return jax.lax.cond(length % chunk_size == 0, refresh, lambda table_BcGPK: table_BcGPK, chunk_table_BcGPK)
