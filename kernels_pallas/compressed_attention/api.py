"""NSA's compressed attention and choice of blocks, with interchangeable differentiable backends.

With blocks of b keys, R = H / G query heads per key head, and block means kbar and vbar:

    o_t = sum_j p_tj vbar_j,  p_t = softmax_j(q_t . kbar_j / sqrt(K)) over the blocks j that end at or before t;
          o_t = 0 if there is no such block
    chosen blocks of t and a key head: the first block, the block before the local block, then the blocks before the
          local block with the largest p, averaged over the R heads

The choice has no gradient; ties go to the lowest block. Backward pass, with do the gradient of o and D = do . o:

    ds_tj = p_tj (do_t . vbar_j - D_t) / sqrt(K)
    dq_t = sum_j ds_tj kbar_j,   dkbar_j = sum_t ds_tj q_t,   dvbar_j = sum_t p_tj do_t      sums over R heads

xla keeps its inputs and recomputes p in the backward pass. triton also keeps o and the log-sum-exps, with the
checkpoint names `attention_out` and `attention_lse`, and never writes scores to memory. Reverse mode only, once.

Source: arXiv 2502.11089; fla/ops/nsa/naive.py in flash-linear-attention.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from kernels_pallas import backend, validation
from kernels_pallas.batching import vary_alike
from kernels_pallas.compressed_attention import triton, xla

BACKENDS = (triton.BACKEND, xla.BACKEND)


def compressed_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_mean_BcGK: Float[Array, "B c G K"],
    v_mean_BcGV: Float[Array, "B c G V"],
    positions_T: Int[Array, "T"] | None = None,
    *,
    block_size: int,
    top_k: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Int32[Array, "B T G n"]]:
    """Return attention to the means of complete blocks, and the chosen blocks.

    Args:
      q_BTHK: queries, fp32, bf16 or fp16 (fp64 under x64), any T >= 1.
      k_mean_BcGK: fp32 (fp64) mean keys of c blocks, from `chunk_means`; c may be 0. G divides H, query head h reads
        key head h // (H // G).
      v_mean_BcGV: fp32 (fp64) mean values.
      positions_T: positions of the queries; None: 0 to T - 1.
      block_size: keys per block.
      top_k: blocks to choose for each query and key head, at least 1.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      The attention in q's dtype, and the choice with n = min(top_k, c) (1 if c = 0): different blocks before the local
      block, first the blocks that are always chosen, padded with -1, as `selected_chunk_attention` takes it. Scores,
      softmax and its mean are fp32 (fp64). p and vbar are rounded to q's dtype before their product.

    Raises:
      ValueError: shapes that disagree, or a block_size or top_k below 1.
      BackendError: (a ValueError) the chosen implementation cannot run the call.
    """
    B, T, H, K = q_BTHK.shape
    c, G = k_mean_BcGK.shape[1:3]
    if k_mean_BcGK.shape != (B, c, G, K) or v_mean_BcGV.shape[:3] != (B, c, G):
        raise ValueError(
            f"k_mean_BcGK must be {(B, c, G, K)} and v_mean_BcGV begin with {(B, c, G)} for q_BTHK {q_BTHK.shape}; "
            f"they are {k_mean_BcGK.shape} and {v_mean_BcGV.shape}"
        )
    validation.check_groups(H, G)
    validation.check_chunk_size(block_size)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if not c:
        o_BTHV = jnp.zeros((B, T, H, v_mean_BcGV.shape[3]), q_BTHK.dtype)
        return o_BTHV, jnp.full((B, T, G, 1), -1, jnp.int32)
    operands = q_BTHK, k_mean_BcGK, v_mean_BcGV
    options = {"block_size": block_size, "top_k": top_k, "has_positions": positions_T is not None}
    kernels = backend.pick("compressed_attention", BACKENDS, implementation, operands, options)
    # Under `jax.shard_map`, the kernel's inputs must vary over the same mesh axes.
    q_BTHK, k_mean_BcGK, v_mean_BcGV = vary_alike(*operands)
    o_BTHV, sel_BTGn = kernels.run(
        q_BTHK, k_mean_BcGK, v_mean_BcGV, positions_T, block_size=block_size, top_k=min(top_k, c)
    )
    return o_BTHV, jax.lax.stop_gradient(sel_BTGn)
