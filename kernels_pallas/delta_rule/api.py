"""The delta rule as a differentiable op with interchangeable backends.

    S_t = e^{g_t} S_{t-1} + k_t (x) beta_t (v_t - k_t^T e^{g_t} S_{t-1}),   o_t = q_t^T S_t        S [K, V] per head

DeltaNet (arXiv 2406.06484) has g = 0. Gated DeltaNet (arXiv 2412.06464) has one decay per head. In the chunked form, g
is summed from the chunk start, G_ij = e^{g_i - g_j} for j <= i (else 0), * is the elementwise product, and S is the
state before the chunk:

    X = (I + stril(beta K K^T))^{-1},   R = V - e^g K S,   Y = beta R,   W = (X * G) Y,
    O = e^g Q S + P W,   P = tril(Q K^T) * G,              S <- e^{g_C} S + K^T (e^{g_C - g} W).

The decays multiply after the inverse because (I + A * G)^{-1} = (I + A)^{-1} * G. Let L be the gradient of the state
after a chunk. The gradients need no derivative of the inverse, because dA = -stril(dY W^T):

    dW = P^T dO + e^{g_C - g} K L        dY = (X * G)^T dW        dV = beta dY
    L <- e^{g_C} L + Q^T (e^g dO) - K^T (e^g beta dY)
    dQ = Z K + e^g dO S^T                Z = (dO W^T) * G                   j <= i
    dK = rows + columns                  M = -(dY W^T) * G                  j < i
        rows = beta (M K - e^g dY S^T)
        columns = Z^T Q + (beta M)^T K + e^{g_C - g} W L^T
    dbeta = rowsum(dY * (V - e^g K S)) + rowsum(M * K K^T)
    dg = q . dq + k . rows - k . columns;  the last of a chunk adds e^{g_C} <S, L> + sum_j k_j . (e^{g_C - g} W L^T)_j

The xla backend is array code that JAX differentiates. The triton backend defines these gradients itself, in reverse
mode and once.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.delta_rule import mosaic_gpu, triton, xla
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.segments import check_segments, first_tokens, reset_decays
from kernels_pallas.validation import check_chunk_size

BACKENDS = (triton.BACKEND, mosaic_gpu.BACKEND, xla.BACKEND)


def delta_rule(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    beta_BTH: Float[Array, "B T H"],
    log_g_BTH: Float[Array, "B T H"] | None = None,
    initial_BHKV: Float[Array, "B H K V"] | None = None,
    *,
    segments: Int[Array, "B T"] | None = None,
    chunk_size: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs at all positions and the state after the last position.

    Args:
      q_BTHK: scaled queries; fp32, bf16 or fp16 (fp64 under x64), and any T >= 1. Matrix products use this dtype.
      k_BTHK: keys, which should have unit norm; rounded to the dtype of `q_BTHK`.
      v_BTHV: values, also rounded to the dtype of `q_BTHK`.
      beta_BTH: step sizes in [0, 2]. Step sizes, decays, states and all sums are fp32 (fp64 under x64).
      log_g_BTH: log decays, <= 0; None means no decay.
      initial_BHKV: state before the first position; None means zero.
      segments: the number of each token's document, integers [B, T] that do not decrease along T; None means one
        document. The state is zero before each later document.
      chunk_size: positions per chunk. It does not change the result; triton uses at most 64.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      (o_BTHV in the dtype of `q_BTHK`, last_BHKV in fp32 or fp64).

    Raises:
      ValueError: a chunk size below 1, or segments of another shape.
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: arXiv 2412.06464.
    """
    check_chunk_size(chunk_size)
    check_segments(segments, *beta_BTH.shape[:2])
    dtype, acc = q_BTHK.dtype, accumulation_dtype(q_BTHK)
    if initial_BHKV is None:
        (B, _, H, K), V = q_BTHK.shape, v_BTHV.shape[-1]
        initial_BHKV = jnp.zeros((B, H, K, V), acc)
    if segments is not None:
        log_g_BTH = reset_decays(jnp.zeros_like(beta_BTH) if log_g_BTH is None else log_g_BTH, first_tokens(segments))
    wide = (beta_BTH, initial_BHKV) if log_g_BTH is None else (beta_BTH, initial_BHKV, log_g_BTH)
    operands = (q_BTHK, k_BTHK.astype(dtype), v_BTHV.astype(dtype), *(x.astype(acc) for x in wide))
    kernels = backend.pick("delta_rule", BACKENDS, implementation, operands, {"chunk_size": chunk_size})
    q, k, v, beta, initial, *log_g = vary_alike(*operands)
    return kernels.run(q, k, v, beta, log_g[0] if log_g else None, initial, chunk_size=chunk_size)
