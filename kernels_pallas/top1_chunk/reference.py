"""Top-1 Chunk computed from its definition; the oracle of the tests.

Dense, O(T^2). With n(i) = floor(i / C) and s_ij = scale * q_i . k_j, query i considers the full past chunks c < n(i):

    exact   c*_i = argmax_c logsumexp_{j in c} s_ij
    approx  c*_i = argmax_c q_i . mean_{j in c} k_j          (fp32 mean)
    others  in select_chunk/reference.py
    o_i = sum_j p_ij v_j,  p_i = softmax of s_i over {j in c*_i} and {n(i) C <= j <= i}

With top_k, the softmax is over the k best past chunks and the local chunk. Ties go to the smallest chunk. Queries in
the first chunk have no candidate: their selection is -1, and they read only the local chunk. The argmax has no
gradient. Source: arXiv 2505.18522, Top-1 Chunk.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kernels_pallas.select_chunk.reference import in_one_dtype_per_head, select_chunk


def attend(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    sel_BTH: Int32[Array, "B T H *k"],
    *,
    chunk_size: int,
    scale: float | None = None,
    segments_BT: Int32[Array, "B T"] | None = None,
) -> Float[Array, "B T H V"]:
    """Return attention over the selected chunks and the local chunk up to the query.

    JAX differentiates it.
    """
    scale = float(q_BTHK.shape[-1] ** -0.5) if scale is None else scale
    dtype = v_BTGV.dtype
    q_BTHK, k_BTHK, v_BTHV = in_one_dtype_per_head(q_BTHK, k_BTGK, v_BTGV)
    T = q_BTHK.shape[1]
    s_BTHS = scale * jnp.einsum("bthk,bshk->bths", q_BTHK, k_BTHK, precision="highest")
    t_T1, s_1S = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    is_local_TS = (s_1S // chunk_size == t_T1 // chunk_size) & (s_1S <= t_T1)
    sel_BTHk = sel_BTH.reshape(*q_BTHK.shape[:3], -1)
    is_seen_BTHS = is_local_TS[None, :, None, :] | (sel_BTHk[..., None] == s_1S[0] // chunk_size).any(-2)
    if segments_BT is not None:
        is_seen_BTHS &= (segments_BT[:, :, None] == segments_BT[:, None])[:, :, None]
    p_BTHS = jax.nn.softmax(jnp.where(is_seen_BTHS, s_BTHS, -jnp.inf), axis=-1)
    return jnp.einsum("bths,bshv->bthv", p_BTHS, v_BTHV, precision="highest").astype(dtype)


def top1_chunk_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    *,
    chunk_size: int = 128,
    selection: str = "exact",
    top_k: int = 1,
    shortlist: int = 4,
    table: str = "mean",
    scale: float | None = None,
    segments_BT: Int32[Array, "B T"] | None = None,
) -> Float[Array, "B T H V"]:
    """Select, then attend; same contract as `kernels_pallas.top1_chunk_attention`."""
    rule = {"selection": selection, "top_k": top_k, "shortlist": shortlist, "table": table}
    options = {"chunk_size": chunk_size, "scale": scale, "segments_BT": segments_BT}
    sel_BTH = select_chunk(q_BTHK, k_BTGK, **options, **rule)
    return attend(q_BTHK, k_BTGK, v_BTGV, jax.lax.stop_gradient(sel_BTH), **options)
