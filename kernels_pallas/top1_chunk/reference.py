"""Top-1 Chunk straight from its definition: dense, O(T^2), the oracle of the tests.

With n(i) = floor(i / C) and s_ij = scale * q_i . k_j, query i considers the full past chunks c < n(i):

    exact   c*_i = argmax_c logsumexp_{j in c} s_ij
    approx  c*_i = argmax_c q_i . mean_{j in c} k_j          (fp32 mean)
    o_i = sum_j p_ij v_j,  p_i = softmax of s_i over {j in c*_i} and {n(i) C <= j <= i}

Ties go to the smallest chunk. Queries of the first chunk have no candidate: selection -1, own chunk only.
Source: arXiv 2505.18522, Top-1 Chunk. The argmax routes and has no gradient.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas import checks


def chunk_scores(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    *,
    chunk_size: int,
    selection: str = "exact",
    scale: float | None = None,
) -> Float[Array, "B T H c"]:
    """What the selection maximises, per query and full chunk; -inf where the chunk is not past."""
    scale = 1 / math.sqrt(q_BTHK.shape[-1]) if scale is None else scale
    q_BTHK, k_BTHK = _dense(q_BTHK, k_BTGK)
    B, T, H, K = q_BTHK.shape
    n_full = T // chunk_size
    k_BcCHK = k_BTHK[:, : n_full * chunk_size].reshape(B, n_full, chunk_size, H, K)
    if selection == "exact":
        s_BTHcC = scale * jnp.einsum("bthk,bcshk->bthcs", q_BTHK, k_BcCHK, precision="highest")
        score_BTHc = jax.nn.logsumexp(s_BTHcC, axis=-1)
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


def attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    sel_BTH: Int32[Array, "B T H"],
    *,
    chunk_size: int,
    scale: float | None = None,
) -> Float[Array, "B T H V"]:
    """Attention over the selected chunk and the own chunk up to the query; differentiable by JAX."""
    scale = 1 / math.sqrt(q_BTHK.shape[-1]) if scale is None else scale
    dtype = v_BTGV.dtype
    q_BTHK, k_BTHK, v_BTHV = _dense(q_BTHK, k_BTGK, v_BTGV)
    T = q_BTHK.shape[1]
    s_BTHS = scale * jnp.einsum("bthk,bshk->bths", q_BTHK, k_BTHK, precision="highest")
    t_T1, s_1S = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    is_local_TS = (s_1S // chunk_size == t_T1 // chunk_size) & (s_1S <= t_T1)
    is_seen_BTHS = is_local_TS[None, :, None, :] | (sel_BTH[..., None] == s_1S[0] // chunk_size)
    p_BTHS = jax.nn.softmax(jnp.where(is_seen_BTHS, s_BTHS, -jnp.inf), axis=-1)
    return jnp.einsum("bths,bshv->bthv", p_BTHS, v_BTHV, precision="highest").astype(dtype)


def top1_chunk_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    *,
    chunk_size: int = 128,
    selection: str = "exact",
    scale: float | None = None,
) -> Float[Array, "B T H V"]:
    """Selection, then attention; the same contract as `kernels_pallas.top1_chunk_attention`."""
    sel_BTH = select_chunk(q_BTHK, k_BTGK, chunk_size=chunk_size, selection=selection, scale=scale)
    return attend(q_BTHK, k_BTGK, v_BTGV, jax.lax.stop_gradient(sel_BTH), chunk_size=chunk_size, scale=scale)


def _dense(q_BTHK: Array, *others: Array) -> tuple[Array, ...]:
    """Everything in the accumulation dtype, keys and values repeated to one per query head."""
    dtype = checks.accumulation_dtype(q_BTHK.dtype)
    H = q_BTHK.shape[2]
    repeated = [jnp.repeat(x.astype(dtype), H // x.shape[2], axis=2) for x in others]
    return (q_BTHK.astype(dtype), *repeated)
