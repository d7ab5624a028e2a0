"""Selective scan: a linear recurrence with a decay per channel and state.

    h_t[e, n] = exp(dt_t[e] A[e, n]) h_{t-1}[e, n] + dt_t[e] x_t[e] B_t[n]
    y_t[e] = sum_n C_t[n] h_t[e, n] + D[e] x_t[e]

This is Mamba-1's recurrence: Gu and Dao, arXiv 2312.00752, algorithm 2. `kernels_pallas.selective_scan` has the
gradient and the backends. dt, A, decays and states are float32 (float64 for float64 inputs).
"""

import jax.numpy as jnp
from jaxtyping import Float

import kernels_pallas
from kernels_pallas import accumulation_dtype
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array


def selective_scan(
    x_BTE: Float[Array, "B T E"],
    dt_BTE: Float[Array, "B T E"],
    A_EN: Float[Array, "E N"],
    B_BTN: Float[Array, "B T N"],
    C_BTN: Float[Array, "B T N"],
    D_E: Float[Array, "E"] | None = None,
    *,
    dt_bias_E: Float[Array, "E"] | None = None,
    initial_state: Float[Array, "B E N"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "B T E"] | tuple[Float[Array, "B T E"], Float[Array, "B E N"]]:
    """Return the outputs and, with `return_state`, the final state.

    The outputs have the dtype of `x_BTE`, the state is float32. `dt_BTE` is at least 0 (after the softplus) and `A_EN`
    at most 0; pass both in float32. With `dt_bias_E`, `dt_BTE` is the raw projection, and the kernels compute the step
    sizes softplus(dt_BTE + dt_bias_E) in float32. Only the xla backend uses `chunk_size` (default 32, at most T), which
    does not change the result. There is only a reverse-mode gradient.
    """
    acc = accumulation_dtype(x_BTE, dt_BTE)
    if D_E is None:
        D_E = jnp.zeros(A_EN.shape[:1], acc)
    if initial_state is None:
        initial_state = jnp.zeros((x_BTE.shape[0], *A_EN.shape), acc)
    A_EN, D_E, initial_state = (t.astype(acc) for t in (A_EN, D_E, initial_state))
    if dt_bias_E is None:
        dt_BTE = dt_BTE.astype(acc)
    else:
        dt_bias_E = dt_bias_E.astype(acc)
    x_BTE, dt_BTE, B_BTN, C_BTN = time_to_heads(x_BTE), time_to_heads(dt_BTE), gather_time(B_BTN), gather_time(C_BTN)
    y_BTE, state_BEN = kernels_pallas.selective_scan(
        x_BTE, dt_BTE, A_EN, B_BTN, C_BTN, D_E, initial_state, dt_bias_E=dt_bias_E, chunk_size=chunk_size
    )
    y_BTE = heads_to_time(y_BTE)
    return (y_BTE, state_BEN) if return_state else y_BTE
