"""The `xla` backend of the compressed attention: float32 scores of `PIECE` queries at a time.

The backward pass recomputes the scores, so at most `PIECE` c scores per head exist at once.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.backend import Backend
from kernels_pallas.chunks import join_chunks, split_chunks
from kernels_pallas.compressed_attention.interface import CompressedAttention
from kernels_pallas.numerics import MASKED

PIECE = 1024  # queries per piece
ALWAYS = 2.0  # the score of a block that is always chosen; the mean of probabilities is at most 1


def load() -> CompressedAttention:
    """Return this module."""
    from kernels_pallas.compressed_attention import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    q_BTHK: Array,
    k_mean_BcGK: Array,
    v_mean_BcGV: Array,
    positions_T: Array | None,
    *,
    block_size: int,
    top_k: int,
) -> tuple[Array, Array]:
    """Return the attention and the choice."""
    n_batch, n_queries, n_heads, head_dim = q_BTHK.shape
    n_blocks, n_kv = k_mean_BcGK.shape[1:3]
    positions_T = jnp.arange(n_queries) if positions_T is None else positions_T
    block_c = jnp.arange(n_blocks)
    v_BcGV = v_mean_BcGV.astype(q_BTHK.dtype)

    def attend_piece(_: None, inputs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        q_BtHK, position_t1 = inputs[0], inputs[1][:, None]
        q_BtGRK = q_BtHK.reshape(n_batch, -1, n_kv, n_heads // n_kv, head_dim).astype(k_mean_BcGK.dtype)
        # Full precision, as in `select_chunk`: there are few products, and a near tie decides which keys are read.
        s_BtGRc = head_dim**-0.5 * jnp.einsum("btgrk,bcgk->btgrc", q_BtGRK, k_mean_BcGK, precision="highest")
        is_complete_tGRc = (((block_c + 1) * block_size) <= position_t1 + 1)[:, None, None]
        p_BtGRc = jax.nn.softmax(jnp.where(is_complete_tGRc, s_BtGRc, MASKED), axis=-1)
        p_BtGRc = jnp.where(is_complete_tGRc, p_BtGRc, 0.0)
        o_BtGRV = jnp.einsum("btgrc,bcgv->btgrv", p_BtGRc.astype(v_BcGV.dtype), v_BcGV)
        own_t1 = position_t1 // block_size
        is_always_t1c = ((block_c == 0) | (block_c == own_t1 - 1))[:, None]
        score_BtGc = jnp.where(is_always_t1c, ALWAYS, lax.stop_gradient(p_BtGRc).mean(3))
        score_BtGc = jnp.where((block_c < own_t1)[:, None], score_BtGc, -1.0)
        sel_nBtG = []
        for _rank in range(top_k):  # XLA cannot split `lax.top_k` over a batch on several devices
            best_BtG = jnp.argmax(score_BtGc, axis=-1).astype(jnp.int32)
            sel_nBtG.append(jnp.where(score_BtGc.max(-1) < 0, -1, best_BtG))
            score_BtGc = jnp.where(block_c == best_BtG[..., None], -1.0, score_BtGc)
        return None, (o_BtGRV.reshape(*q_BtHK.shape[:3], -1), jnp.stack(sel_nBtG, axis=-1))

    piece = min(PIECE, n_queries)
    q_PBtHK = jnp.moveaxis(split_chunks(q_BTHK, piece), 1, 0)
    position_Pt = jnp.pad(positions_T, (0, q_PBtHK.shape[0] * piece - n_queries)).reshape(-1, piece)
    _, pieces = lax.scan(jax.checkpoint(attend_piece, prevent_cse=False), None, (q_PBtHK, position_Pt))
    o_BTHV, sel_BTGn = (join_chunks(jnp.moveaxis(x, 0, 1), n_queries) for x in pieces)
    return o_BTHV, sel_BTGn
