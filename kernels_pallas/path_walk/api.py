"""PaTH attention to earlier chunks; the query changes at every chunk that it passes.

    q^(n-1) = q^(n) - q^(n) P_n          a query of chunk i meets chunk n as q^(n); the operand is q^(i-1)
    s_ij = q_i^(n(j)) . k_j + c_i - c_j  with n(j) the chunk of j
    o_i = sum_j exp(s_ij - L_i) v_j + exp(own lse_i - L_i) own o_i,   L_i = logsumexp of both

The sums run over the keys j of earlier chunks. The softmax result over the keys of a query's own chunk is an operand
and is merged with them. This is the quadratic part of PaTH attention (arXiv 2505.16381); seqjax/ops/path_attention.py
has the part within chunks.
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
    """Return o in float32: `own` merged with the attention to earlier chunks.

    Args:
      q_cBHCK: queries, transformed to the start of their chunk and multiplied by the score scale; fp32.
      k_cBHCK: keys, transformed to the end of their chunk; fp32, bf16 or fp16. Scores use this dtype.
      v_cBHCV: values, same dtype as the keys.
      product_cBHKK: P of each chunk; fp32. Entries are between -2 and 2 in PaTH; triton rounds them to fp16 unless the
        keys are fp32.
      forgotten_cBHC: c, the running sum of the log forget gates; fp32. None means no forget gates.
      own: (outputs, logsumexp of the scores) from the query's chunk itself; fp32.
      implementation: backend name; None picks the best backend that can run the call.

    Raises:
      BackendError: (a ValueError) the chosen implementation cannot run the call.
    """
    options = {"chunks": len(q_cBHCK)}
    kernels = backend.pick("path_walk", BACKENDS, implementation, (k_cBHCK, v_cBHCV), options)
    if len(q_cBHCK) == 1:  # after `pick`: it checks the implementation
        return own[0]
    return kernels.run(q_cBHCK, k_cBHCK, v_cBHCV, product_cBHKK, forgotten_cBHC, *own)
