"""Attention of every chunk's queries to the chunks before theirs, on the way back over which they change.

    q^(n-1) = q^(n) - q^(n) P_n          the query of chunk i meets chunk n as q^(n); q^(i-1) is what it is given as
    s_ij = q_i^(n(j)) . k_j + c_i - c_j  with n(j) the chunk of j
    o_i = sum_j exp(s_ij - L_i) v_j + exp(own lse_i - L_i) own o_i,   L_i = logsumexp of both

over the keys j of chunks before that of i: what a softmax over the keys of its own chunk gave is joined with them. This
is the part of PaTH attention (arXiv 2505.16381) that is quadratic in the sequence; the other, within chunks, is in
seqjax/ops/path_attention.py.
"""

from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.path_walk import triton, xla

BACKENDS = (triton.BACKEND, xla.BACKEND)


def path_walk(
    q_cBHCK: Float[Array, "c B H C K"],
    k_cBHCK: Float[Array, "c B H C K"],
    v_cBHCV: Float[Array, "c B H C V"],
    product_cBHKK: Float[Array, "c B H K K"],
    forgotten_cBHC: Float[Array, "c B H C"] | None = None,
    *,
    own: tuple[Float[Array, "c B H C V"], Float[Array, "c B H C"]],
    implementation: str | None = None,
) -> Float[Array, "c B H C V"]:
    """Return o, float32: `own` joined with what the queries see of the chunks before theirs.

    Args:
      q_cBHCK: queries at the beginning of their chunk, with the scale of the scores, fp32.
      k_cBHCK: keys at the end of theirs, fp32, bf16 or fp16: what scores are computed with.
      v_cBHCV: values, of the same dtype.
      product_cBHKK: P of each chunk, fp32.
      forgotten_cBHC: c, the sums of the logarithms of forget gates up to each position, fp32; None is none.
      own: of the keys of a query's own chunk the outputs and the logarithms of the sums of exp(s), fp32.
      implementation: None is xla; a name gets that backend or an error.

    Raises:
      BackendError: (a ValueError) the named implementation cannot run this.
    """
    options = {"chunks": len(q_cBHCK)}
    kernels = backend.pick("path_walk", BACKENDS, implementation, (k_cBHCK, v_cBHCV), options)
    if len(q_cBHCK) == 1:  # also here a name that cannot run is an error
        return own[0]
    return kernels.run(q_cBHCK, k_cBHCK, v_cBHCV, product_cBHKK, forgotten_cBHC, *own)
