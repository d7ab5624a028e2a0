"""The core of KDA and Gated DeltaNet-2: the delta rule with a decay per key channel.

    S <- diag(e^{lw_t}) S_{t-1};   S_t = S + k'_t (x) (v_t - e_t^T S);   y_t = q_t^T S_t,   S [K, V], float32

A gate beta per head: e = k, k' = sigmoid(beta) k (KDA, arXiv 2510.26692). Gates per key channel: e = sigmoid(beta) * k,
k' = k (Gated DeltaNet-2, arXiv 2605.22791). `kernels_pallas/kda` has the decays, the gradient, and the XLA and Triton
backends, which make decays and gates from pre-activations in the input dtype.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

import kernels_pallas
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 64


def kda(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    decay_BTHK: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"] | Float[Array, "B T H K"],
    *,
    rate_H: Float[Array, "H"],
    bias_HK: Float[Array, "H K"],
    lower_bound: float | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs in the dtype of `q_BTHK` and the final state, at least float32.

    Operands are as in `kernels_pallas.kda`.
    """
    o_BTHV, s_BHKV = kernels_pallas.kda(
        time_to_heads(q_BTHK),
        time_to_heads(k_BTHK),
        time_to_heads(v_BTHV.astype(q_BTHK.dtype)),
        time_to_heads(decay_BTHK),
        time_to_heads(beta),
        initial_state,
        rate_H=rate_H,
        bias_HK=bias_HK,
        lower_bound=lower_bound,
        segments=None if segments is None else gather_time(segments),
        chunk_size=min(chunk_size or CHUNK, q_BTHK.shape[1]),
        implementation=implementation,
    )
    return heads_to_time(o_BTHV), s_BHKV


def kda_step(
    q_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    decay_BHK: Float[Array, "B H K"],
    beta: Float[Array, "B H"] | Float[Array, "B H K"],
    s_BHKV: Float[Array, "B H K V"],
    *,
    rate_H: Float[Array, "H"],
    bias_HK: Float[Array, "H K"],
    lower_bound: float | None = None,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Return the output and the state after one token.

    The output has the dtype of `q_BHK`; the arithmetic has the dtype of the state.
    """
    dtype, acc = q_BHK.dtype, s_BHKV.dtype
    q_BHK, k_BHK, v_BHV, decay_BHK, beta = (x.astype(acc) for x in (q_BHK, k_BHK, v_BHV, decay_BHK, beta))
    log_w_BHK = kernels_pallas.kda_log_decay(decay_BHK, rate_H.astype(acc), bias_HK.astype(acc), lower_bound)
    is_per_channel = beta.ndim == k_BHK.ndim
    gated_BHK = jax.nn.sigmoid(beta if is_per_channel else beta[..., None]) * k_BHK
    erased_BHK, written_BHK = (gated_BHK, k_BHK) if is_per_channel else (k_BHK, gated_BHK)
    s_BHKV = jnp.exp(log_w_BHK)[..., None] * s_BHKV
    # Sums instead of one-row matrix products: XLA then compiles each line into one loop over the state.
    error_BHV = v_BHV - jnp.sum(erased_BHK[..., None] * s_BHKV, axis=-2)
    s_BHKV = s_BHKV + written_BHK[..., :, None] * error_BHV[..., None, :]
    return jnp.sum(q_BHK[..., None] * s_BHKV, axis=-2).astype(dtype), s_BHKV
