"""The (gated) delta rule as a differentiable function over interchangeable backends.

    S_t = e^{g_t} S_{t-1} + k_t (x) beta_t (v_t - k_t^T e^{g_t} S_{t-1}),   o_t = q_t^T S_t        S [K, V] per head

DeltaNet (arXiv 2406.06484) has g = 0, Gated DeltaNet (arXiv 2412.06464) a decay per head. In a chunk, with g summed
from its start, G_ij = e^{g_i - g_j} for j <= i and else 0, * the elementwise product, and S the state before it,

    X = (I + stril(beta K K^T))^{-1},   R = V - e^g K S,   Y = beta R,   W = (X * G) Y,
    O = e^g Q S + P W,   P = tril(Q K^T) * G,              S <- e^{g_C} S + K^T (e^{g_C - g} W).

The decays multiply after the inverse, because (I + A * G)^{-1} = (I + A)^{-1} * G. With L the gradient of the state
after a chunk, the gradients are (there is none through the inverse: dA = -stril(dY W^T))

    dW = P^T dO + e^{g_C - g} K L        dY = (X * G)^T dW        dV = beta dY
    L <- e^{g_C} L + Q^T (e^g dO) - K^T (e^g beta dY)
    dQ = Z K + e^g dO S^T                Z = (dO W^T) * G                   j <= i
    dK = rows + columns                  M = -(dY W^T) * G                  j < i
        rows = beta (M K - e^g dY S^T)
        columns = Z^T Q + (beta M)^T K + e^{g_C - g} W L^T
    dbeta = rowsum(dY * (V - e^g K S)) + rowsum(M * K K^T)
    dg = q . dq + k . rows - k . columns, and the last of a chunk gets e^{g_C} <S, L> + sum of k . (e^{g_C - g} W L^T).

xla is plain array code; triton defines its derivative itself, for reverse mode, once.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.delta_rule import triton, xla
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.validation import check_chunk_size

BACKENDS = (triton.BACKEND, xla.BACKEND)


def delta_rule(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    beta_BTH: Float[Array, "B T H"],
    log_g_BTH: Float[Array, "B T H"] | None = None,
    initial_BHKV: Float[Array, "B H K V"] | None = None,
    *,
    chunk_size: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs of all positions, and the state after the last.

    Args:
      q_BTHK: queries, scaled; fp32, bf16 or fp16 (fp64 under x64), and any T >= 1. Products are made in its dtype.
      k_BTHK: keys, which should have unit norm; rounded to the dtype of `q_BTHK`.
      v_BTHV: values, likewise rounded.
      beta_BTH: step sizes, in [0, 2]. They, the decays and the states are fp32 (fp64), the dtype of all sums.
      log_g_BTH: logarithms of the decays, <= 0; None is no decay.
      initial_BHKV: the state before the first position; None is zero.
      chunk_size: positions per chunk, which the result does not depend on; triton takes at most 64.
      implementation: None picks the best backend that can run this; a name gets that one or an error.

    Returns:
      (o_BTHV in the dtype of `q_BTHK`, last_BHKV in fp32, or fp64).

    Raises:
      ValueError: a chunk size below 1.
      BackendError: (a ValueError) the named implementation cannot run this.

    Source: arXiv 2412.06464.
    """
    check_chunk_size(chunk_size)
    dtype, acc = q_BTHK.dtype, accumulation_dtype(q_BTHK)
    if initial_BHKV is None:
        (B, _, H, K), V = q_BTHK.shape, v_BTHV.shape[-1]
        initial_BHKV = jnp.zeros((B, H, K, V), acc)
    wide = (beta_BTH, initial_BHKV) if log_g_BTH is None else (beta_BTH, initial_BHKV, log_g_BTH)
    operands = (q_BTHK, k_BTHK.astype(dtype), v_BTHV.astype(dtype), *(x.astype(acc) for x in wide))
    kernels = backend.pick("delta_rule", BACKENDS, implementation, operands, {"chunk_size": chunk_size})
    q, k, v, beta, initial, *log_g = vary_alike(*operands)
    return kernels.run(q, k, v, beta, log_g[0] if log_g else None, initial, chunk_size=chunk_size)
