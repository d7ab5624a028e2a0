"""KDA and Gated DeltaNet-2 from the pre-activations of their gates, with interchangeable backends.

    log w_t = -rate softplus(decay_t + bias),   or lower_bound sigmoid(rate (decay_t + bias))
    S <- diag(w_t) S_{t-1};   S_t = S + k'_t (x) (v_t - e_t^T S);   o_t = q_t^T S_t                  S [K, V] per head

With a gate beta per head (KDA, arXiv 2510.26692) e = k and k' = sigmoid(beta) k; with gates per key channel (Gated
DeltaNet-2, arXiv 2605.22791) e = sigmoid(beta) * k and k' = k. The recurrence is `linear_attention`'s with b = k' and
a = -w e. Its equations hold with the reader a = -e after its decay: every reader then has the weight e^g of its
position, and all pairs have the factor e^{g_i - g_j}. Gradients in addition to `linear_attention`'s, with da of a = -e
and the sum over a head's key channels:

    KDA:             dk = sigmoid(beta) dk' - da,   dbeta = sigmoid'(beta) sum k dk'
    DeltaNet-2:      dk = dk' - sigmoid(beta) da,   dbeta = -sigmoid'(beta) k da
    d log w = sums of dg from the position to the chunk end;   ddecay, drate and dbias by its chain rule

The xla backend makes the operands of `linear_attention` in array code. The triton backend makes decays and gates within
its kernels, so no float32 array of the sequence's decays is written or read; it keeps its weighted operands.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.kda import triton, xla
from kernels_pallas.linear_attention.api import linear_attention
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.validation import check_chunk_size

BACKENDS = (triton.BACKEND, xla.BACKEND)
WIDEST = 128  # value dim up to which the gradient kernel keeps a chunk in shared memory


def kda(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    decay_BTHK: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"] | Float[Array, "B T H K"],
    initial_BHKV: Float[Array, "B H K V"] | None = None,
    *,
    rate_H: Float[Array, "H"],
    bias_HK: Float[Array, "H K"],
    lower_bound: float | None = None,
    segments: Int[Array, "B T"] | None = None,
    chunk_size: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs at all positions and the state after the last position.

    Args:
      q_BTHK: queries, normed and scaled.
      k_BTHK: keys, normed.
      v_BTHV: values; fp32, bf16 or fp16 (fp64 under x64), and any T >= 1. Matrix products use this dtype. With a dim
        above 128, `linear_attention` runs on operands in memory.
      decay_BTHK: pre-activations of the decays, in this dtype, without bias. Decays, states and all sums are fp32
        (fp64).
      beta: pre-activations of the gates. [B, T, H]: of erased and written keys together. [B, T, H, K]: of erased keys.
      initial_BHKV: state before the first position; None means zero.
      rate_H: rates of the decays, above 0.
      bias_HK: biases of the decays.
      lower_bound: None, or the lower bound of a token's log decay (below 0), which selects the bounded form.
      segments: the number of each token's document, as in `linear_attention`, which then also runs on such operands.
      chunk_size: positions per chunk. It does not change the result; triton uses at most 64.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      (o_BTHV in the dtype of `v_BTHV`, last_BHKV in fp32 or fp64).

    Raises:
      ValueError: a chunk size below 1, a lower bound of 0 or more, or shapes that disagree.
      BackendError: (a ValueError) the chosen implementation cannot run the call.
    """
    check_chunk_size(chunk_size)
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"lower_bound is {lower_bound}; a bound of a log decay is below 0")
    shape, acc, dtype = q_BTHK.shape, accumulation_dtype(v_BTHV), v_BTHV.dtype
    expected = {"k_BTHK": (k_BTHK, shape), "decay_BTHK": (decay_BTHK, shape), "rate_H": (rate_H, shape[2:3])}
    expected |= {"bias_HK": (bias_HK, shape[2:]), "beta": (beta, shape[: beta.ndim])}
    for name, (x, wanted) in expected.items():
        if x.shape != wanted:
            raise ValueError(f"{name} must be {wanted} for q_BTHK {shape}; it is {x.shape}")
    if initial_BHKV is None:
        initial_BHKV = jnp.zeros((shape[0], *shape[2:], v_BTHV.shape[-1]), acc)
    rate_H, bias_HK, initial_BHKV = (x.astype(acc) for x in (rate_H, bias_HK, initial_BHKV))
    q_BTHK, k_BTHK, decay_BTHK = (x.astype(dtype) for x in (q_BTHK, k_BTHK, decay_BTHK))
    beta = beta.astype(dtype if beta.ndim == q_BTHK.ndim else acc)
    if segments is not None or v_BTHV.shape[-1] > WIDEST:
        k, log_w, a = xla.operands(k_BTHK, decay_BTHK, beta, rate_H, bias_HK, lower_bound)
        options = {"segments": segments, "chunk_size": chunk_size, "implementation": implementation}
        return linear_attention(q_BTHK, k, v_BTHV, log_w, None, initial_BHKV, low_rank=(a, None), **options)
    arrays = (q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta, rate_H, bias_HK, initial_BHKV)
    kernels = backend.pick("kda", BACKENDS, implementation, (*arrays[:4], initial_BHKV), {"chunk_size": chunk_size})
    return kernels.run(*vary_alike(*arrays), lower_bound=lower_bound, chunk_size=chunk_size)
