"""Linear attention with a decay per key channel as a differentiable function over interchangeable backends.

    S_t = diag(w_t) S_{t-1} + k_t (x) v_t                                                  S [K, V] per head
    o_t = r_t^T (S_{t-1} + diag(u) k_t (x) v_t), or r_t^T S_t without u

RWKV-6 (arXiv 2404.05892) has the bonus u; RWKV-5's decay is constant in time; GLA (arXiv 2312.06635) has no u. In a
chunk, with g the running sum of log w from its start, g' that which r reads (g with u one position earlier, else g),
and S the state before it,

    (r|k)_ij = sum_n r_in k_jn e^{g'_in - g_jn} for j < i,   (r|k)_ii = sum_n r_in u_n k_in        u = 1 without u
    R~ = R e^{g'},   K^ = K e^{g_C - g},   O = (r|k) V + R~ S,   S <- diag(e^{g_C}) S + K^^T V.

With L the gradient of the state after a chunk, and A = (dO V^T)_ij for j < i, the gradients mirror this:

    dV = (r|k)^T dO + K^ L          L <- diag(e^{g_C}) L + R~^T dO
    dR = e^{g'} (dO S^T) + the sum over j of A_ij k_j e^{g'_i - g_j}          and both have A_ii u k_i, A_ii u r_i
    dK = e^{g_C - g} (V L^T) + the sum over i of A_ij r_i e^{g'_i - g_j}
    dg' = r dR, dg = -k dK without the terms of A_ii, and the last of a chunk gets diag(S L^T) e^{g_C} + sum of k e^{g_C - g} (V L^T).

xla is plain array code; triton defines its derivative itself, for reverse mode, once.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.linear_attention import triton, xla
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.validation import check_chunk_size

BACKENDS = (triton.BACKEND, xla.BACKEND)
# A decay of e^-60 is negligible in float32; below it, differences of sums of log w would lose precision.
FLOOR = -60.0


def linear_attention(
    r_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_w_BTHK: Float[Array, "#B #T H K"],
    u_HK: Float[Array, "H K"] | None = None,
    initial_BHKV: Float[Array, "B H K V"] | None = None,
    *,
    chunk_size: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs of all positions, and the state after the last.

    Args:
      r_BTHK: receptances, or queries, scaled.
      k_BTHK: keys.
      v_BTHV: values; fp32, bf16 or fp16 (fp64 under x64), and any T >= 1. Products are made in its dtype.
      log_w_BTHK: logarithms of the decays, <= 0 without a lower bound. They, u and the states are fp32 (fp64), the
        dtype of all sums. B and T may be 1: a constant decay.
      u_HK: the bonus of the current token, which r then reads before it decays the state; None reads after that.
      initial_BHKV: the state before the first position; None is zero.
      chunk_size: positions per chunk, which the result does not depend on; triton takes at most 64.
      implementation: None picks the best backend that can run this; a name gets that one or an error.

    Returns:
      (o_BTHV in the dtype of `v_BTHV`, last_BHKV in fp32, or fp64).

    Raises:
      ValueError: a chunk size below 1.
      BackendError: (a ValueError) the named implementation cannot run this.

    Source: arXiv 2404.05892.
    """
    check_chunk_size(chunk_size)
    acc = accumulation_dtype(v_BTHV, log_w_BTHK)
    if initial_BHKV is None:
        (B, _, H, K), V = r_BTHK.shape, v_BTHV.shape[-1]
        initial_BHKV = jnp.zeros((B, H, K, V), acc)
    log_w_BTHK = jnp.broadcast_to(jnp.maximum(log_w_BTHK.astype(acc), FLOOR), r_BTHK.shape)
    operands = (r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, initial_BHKV.astype(acc))
    bonus = () if u_HK is None else (u_HK.astype(acc),)
    options = {"chunk_size": chunk_size}
    kernels = backend.pick("linear_attention", BACKENDS, implementation, (*operands, *bonus), options)
    r, k, v, log_w, initial, *bonus = vary_alike(*operands, *bonus)
    return kernels.run(r, k, v, log_w, bonus[0] if bonus else None, initial, chunk_size=chunk_size)
