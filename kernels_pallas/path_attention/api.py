"""PaTH attention, with interchangeable differentiable backends.

    H_t = I - beta_t w_t w_t^T,  |w_t| = 1;   s_ij = q_i^T H_i H_{i-1} ... H_{j+1} k_j / sqrt(K) + c_i - c_j
    o_i = sum_j softmax_j(s_ij) v_j   for j <= i,   c_i = sum of log f up to token i

Yang et al., arXiv 2505.16381; flash-linear-attention, `fla/ops/path_attn/naive.py`, uses the same chunks. For a chunk
with rows W, let B = diag(beta) and S the strictly lower part of W W^T. The product of the chunk's matrices is

    H_C ... H_1 = I - W^T T W,   T = (I + B S)^{-1} B

T also gives partial products: the matrices up to query row i contribute lower(Q W^T)_i T W, and the rows of W below row
j belong to the matrices after key j. Queries are multiplied by the matrices back to the start of their chunk, keys by
the matrices up to the end of their chunk. All queries then step back over the earlier chunks, one K x K matrix per
chunk (`kernels_pallas.path_walk`).
"""

from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.path_attention import triton, xla

BACKENDS = (triton.BACKEND, xla.BACKEND)


def path_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    w_BTGK: Float[Array, "B T G K"],
    beta_BTG: Float[Array, "B T G"],
    log_f_BTH: Float[Array, "B T H"] | None = None,
    *,
    chunk_size: int = 128,
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """Return o in the dtype of q. G key-value heads, each with a separate path, serve H query heads.

    Args:
      q_BTHK: queries; fp32, bf16 or fp16, any T >= 1.
      k_BTGK: keys; scores use their dtype.
      v_BTGV: values, same dtype as the keys.
      w_BTGK: unit vectors of the matrices; fp32.
      beta_BTG: step sizes in (0, 2); fp32.
      log_f_BTH: log forget gates (FoX, arXiv 2503.02130); fp32. None means no forget gates.
      chunk_size: most tokens per product of matrices. It affects only the speed; triton uses at most 64.
      implementation: backend name; None picks the best backend that can run the call.

    Raises:
      BackendError: (a ValueError) the chosen implementation cannot run the call.
    """
    options = {"chunk_size": min(chunk_size, q_BTHK.shape[1])}
    kernels = backend.pick("path_attention", BACKENDS, implementation, (q_BTHK, k_BTGK, v_BTGV), options)
    return kernels.run(q_BTHK, k_BTGK, v_BTGV, w_BTGK, beta_BTG, log_f_BTH, **options)
