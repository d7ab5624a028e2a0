"""The (gated) delta rule: linear attention with a corrected state.

    S_t = e^{g_t} S_{t-1} + k_t (x) beta_t (v_t - k_t^T e^{g_t} S_{t-1}),   y_t = q_t^T S_t,   S [K, V], float32

Each step corrects the state towards the value. See DeltaNet (arXiv 2406.06484, g = 0) and Gated DeltaNet (arXiv
2412.06464); public code: flash-linear-attention, `fla/ops/{delta_rule,gated_delta_rule}/naive.py`.
`kernels_pallas/delta_rule` has the chunked form, its gradient, and the XLA and Triton backends. Decays, beta and states
are float32; products use the input dtype.
"""

import jax.numpy as jnp
from jaxtyping import Float, Int

import kernels_pallas
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 64


def gated_delta_rule(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    beta_BTH: Float[Array, "B T H"],
    log_g_BTH: Float[Array, "B T H"] | None = None,
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    segments: Int[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs and, with `return_state`, the final state.

    The outputs have the dtype of `q_BTHK`, the state at least float32. `q_BTHK` must be scaled and `k_BTHK` have unit
    norm; `beta_BTH` is in [0, 2] and `log_g_BTH` <= 0. `chunk_size` (default 64, at most T) changes time and memory,
    not the result. The backward pass needs the inputs and, per chunk, one state and one inverse. `segments` and
    `implementation` are as in `kernels_pallas`.
    """
    o_BTHV, s_BHKV = kernels_pallas.delta_rule(
        time_to_heads(q_BTHK),
        time_to_heads(k_BTHK),
        time_to_heads(v_BTHV),
        time_to_heads(beta_BTH),
        None if log_g_BTH is None else time_to_heads(log_g_BTH),
        initial_state,
        segments=None if segments is None else gather_time(segments),
        chunk_size=min(chunk_size or CHUNK, q_BTHK.shape[1]),
        implementation=implementation,
    )
    o_BTHV = heads_to_time(o_BTHV)
    return (o_BTHV, s_BHKV) if return_state else o_BTHV


def gated_delta_rule_step(
    q_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    beta_BH: Float[Array, "B H"],
    log_g_BH: Float[Array, "B H"] | None,
    s_BHKV: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Return the output and the state after one token.

    The output has the dtype of `q_BHK`; the arithmetic has the dtype of the state.
    """
    dtype, acc = q_BHK.dtype, s_BHKV.dtype
    q_BHK, k_BHK, v_BHV, beta_BH = (x.astype(acc) for x in (q_BHK, k_BHK, v_BHV, beta_BH))
    if log_g_BH is not None:
        s_BHKV = s_BHKV * jnp.exp(log_g_BH.astype(acc))[..., None, None]
    # Sums instead of one-row matrix products: XLA then compiles each line into one loop over the state.
    w_BHV = beta_BH[..., None] * (v_BHV - jnp.sum(k_BHK[..., None] * s_BHKV, axis=-2))
    s_BHKV = s_BHKV + k_BHK[..., :, None] * w_BHV[..., None, :]
    return jnp.sum(q_BHK[..., None] * s_BHKV, axis=-2).astype(dtype), s_BHKV
