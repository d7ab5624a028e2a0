"""Chunk selection straight from its definition: dense, O(T^2), the oracle of the tests.

With n(i) = floor(i / C) and s_ij = scale * q_i . k_j, query i considers the full past chunks c < n(i):

    exact     argmax_c logsumexp_{j in c} s_ij
    best_key  argmax_c max_{j in c} s_ij
    approx    argmax_c q_i . mean_{j in c} k_j          (fp32 mean)

Ties go to the smallest chunk. Queries of the first chunk have no candidate: -1. Source: arXiv 2505.18522, Top-1 Chunk.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def chunk_scores(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    *,
    chunk_size: int,
    selection: str = "exact",
    scale: float | None = None,
) -> Float[Array, "B T H c"]:
    """The quantity that the selection maximises, per query and full chunk; -inf where the chunk is not past."""
    scale = float(q_BTHK.shape[-1] ** -0.5) if scale is None else scale
    q_BTHK, k_BTHK = in_one_dtype_per_head(q_BTHK, k_BTGK)
    B, T, H, K = q_BTHK.shape
    n_full = T // chunk_size
    k_BcCHK = k_BTHK[:, : n_full * chunk_size].reshape(B, n_full, chunk_size, H, K)
    if selection in ("exact", "best_key"):
        s_BTHcC = scale * jnp.einsum("bthk,bcshk->bthcs", q_BTHK, k_BcCHK, precision="highest")
        score_BTHc = jax.nn.logsumexp(s_BTHcC, axis=-1) if selection == "exact" else s_BTHcC.max(-1)
    else:
        score_BTHc = jnp.einsum("bthk,bchk->bthc", q_BTHK, k_BcCHK.mean(2), precision="highest")
    is_past_Tc = jnp.arange(n_full)[None, :] < jnp.arange(T)[:, None] // chunk_size
    return jnp.where(is_past_Tc[None, :, None, :], score_BTHc, -jnp.inf)


def select_chunk(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    *,
    chunk_size: int,
    selection: str = "exact",
    scale: float | None = None,
) -> Int32[Array, "B T H"]:
    """The chunk that every query selects, -1 in the first chunk."""
    B, T, H, _ = q_BTHK.shape
    if chunk_size > T:
        return jnp.full((B, T, H), -1, jnp.int32)
    score_BTHc = chunk_scores(q_BTHK, k_BTGK, chunk_size=chunk_size, selection=selection, scale=scale)
    best_BTH = jnp.argmax(score_BTHc, axis=-1).astype(jnp.int32)
    return jnp.where((jnp.arange(T) < chunk_size)[None, :, None], -1, best_BTH)


def in_one_dtype_per_head(q_BTHK: Array, *others: Array) -> tuple[Array, ...]:
    """Everything in the accumulation dtype, keys and values repeated to one per query head."""
    dtype = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    H = q_BTHK.shape[2]
    repeated = [jnp.repeat(x.astype(dtype), H // x.shape[2], axis=2) for x in others]
    return (q_BTHK.astype(dtype), *repeated)
