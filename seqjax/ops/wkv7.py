"""The core of RWKV-7: a state with a decay per channel and a rank-one correction.

    S_t = diag(e^{lw_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,   y_t = r_t^T S_t,   S [K, V], float32

RWKV-7 (arXiv 2503.14456; public implementation: BlinkDL/RWKV-LM, RWKV-v7) uses a = -kappa and b = kappa * eta. KDA
(arXiv 2510.26692) uses a = -e^{lw} k and b = beta k, with keys beta k. `kernels_pallas/linear_attention` has the
chunked form, its gradient, and the XLA and Triton backends. XLA needs fewer operations if the total decay within a
chunk is known to be at least e^-80.
"""

import math

import jax.numpy as jnp
from jaxtyping import Float, Int

import kernels_pallas
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 64


def wkv7(
    r_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_w_BTHK: Float[Array, "B T H K"],
    a_BTHK: Float[Array, "B T H K"],
    b_BTHK: Float[Array, "B T H K"] | None,
    *,
    min_log_w: float = -math.inf,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    segments: Int[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs and, with `return_state`, the final state.

    The outputs have the dtype of `r_BTHK`, the state at least float32. `log_w_BTHK` is at most 0. `min_log_w` is a
    lower bound that the caller knows; fewer operations are needed if it keeps the sum over a chunk above -80 (xla) or
    -59 (triton). `b_BTHK` None means `k_BTHK`. The state's key index comes first (it is last in RWKV's code). The
    backward pass needs the inputs and, per chunk, one state and one inverse. `segments` and `implementation`
    are as in `kernels_pallas`.
    """
    seq_len, dtype = r_BTHK.shape[1], r_BTHK.dtype
    if seq_len == 1 and return_state:  # decoding: no chunks; only the state is read and written
        acc = kernels_pallas.accumulation_dtype(r_BTHK)
        shape = (*r_BTHK.shape[:1], *r_BTHK.shape[2:], v_BTHV.shape[-1])
        s_BHKV = jnp.zeros(shape, acc) if initial_state is None else initial_state.astype(acc)
        r_BHK, k_BHK, v_BHV = r_BTHK[:, 0], k_BTHK[:, 0], v_BTHV[:, 0]
        log_w_BHK, a_BHK, b_BHK = log_w_BTHK[:, 0], a_BTHK[:, 0], None if b_BTHK is None else b_BTHK[:, 0]
        o_BHV, s_BHKV = wkv7_step(r_BHK, k_BHK, v_BHV, log_w_BHK, a_BHK, b_BHK, s_BHKV)
        return o_BHV[:, None], s_BHKV
    r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, a_BTHK = (
        time_to_heads(x) for x in (r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, a_BTHK)
    )
    b_BTHK = None if b_BTHK is None else time_to_heads(b_BTHK)
    o_BTHV, s_BHKV = kernels_pallas.linear_attention(
        r_BTHK,
        k_BTHK,
        v_BTHV.astype(dtype),
        log_w_BTHK,
        None,
        initial_state,
        low_rank=(a_BTHK, b_BTHK),
        min_log_w=min_log_w,
        segments=None if segments is None else gather_time(segments),
        chunk_size=min(chunk_size or CHUNK, seq_len),
        implementation=implementation,
    )
    o_BTHV = heads_to_time(o_BTHV)
    return (o_BTHV, s_BHKV) if return_state else o_BTHV


def wkv7_step(
    r_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    log_w_BHK: Float[Array, "B H K"],
    a_BHK: Float[Array, "B H K"],
    b_BHK: Float[Array, "B H K"] | None,
    s_BHKV: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Return the output and the state after one token.

    The output has the dtype of `r_BHK`; the arithmetic has the dtype of the state.
    """
    dtype, acc = r_BHK.dtype, s_BHKV.dtype
    b_BHK = k_BHK if b_BHK is None else b_BHK
    r_BHK, k_BHK, v_BHV, log_w_BHK, a_BHK, b_BHK = (
        x.astype(acc) for x in (r_BHK, k_BHK, v_BHV, log_w_BHK, a_BHK, b_BHK)
    )
    # Sums instead of one-row matrix products: XLA then compiles each line into one loop over the state.
    correction_BHV = jnp.sum(a_BHK[..., None] * s_BHKV, axis=-2)
    s_BHKV = jnp.exp(log_w_BHK)[..., None] * s_BHKV + b_BHK[..., :, None] * correction_BHV[..., None, :]
    s_BHKV = s_BHKV + k_BHK[..., :, None] * v_BHV[..., None, :]
    return jnp.sum(r_BHK[..., None] * s_BHKV, axis=-2).astype(dtype), s_BHKV
