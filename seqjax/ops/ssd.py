"""Linear recurrence with one decay per head (state space duality), in chunks.

    S_t = a_t S_{t-1} + b_t x_t^T,   y_t = c_t S_t        S [N, V] per head, b and c shared by the heads

See Dao and Gu, arXiv 2405.21060 (Mamba-2), section 6. Decays, states and sums are float32; products take the dtype of
`x_BTHV`. `kernels_pallas/ssd` has the chunked form, its gradient, and Triton kernels beside the XLA form. Memory is
linear in T: the inputs and, with Triton, the states at chunk starts are saved for the backward pass.
"""

import jax.numpy as jnp
from jaxtyping import Float

import kernels_pallas
from kernels_pallas import accumulation_dtype
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 128
# A decay of e^-60 is negligible in float32; below it, differences of sums of log a would lose precision.
FLOOR = -60.0


def ssd(
    x_BTHV: Float[Array, "B T H V"],
    log_a_BTH: Float[Array, "B T H"],
    b_BTN: Float[Array, "B T N"],
    c_BTN: Float[Array, "B T N"],
    *,
    dt_BTH: Float[Array, "B T H"] | None = None,
    initial_state: Float[Array, "B H N V"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H N V"]]:
    """Return the outputs in the dtype of `x_BTHV`, and with `return_state` the float32 state after the last token.

    `x_BTHV` must be multiplied by its step size, unless `dt_BTH` gives it here. `log_a_BTH` is at most 0; float32 is
    advised. The result does not depend on `chunk_size` (default 128, at most T). `implementation` is as in
    `kernels_pallas`.
    """
    n_batch, seq_len, n_heads, n_value = x_BTHV.shape
    acc = accumulation_dtype(x_BTHV, log_a_BTH)
    if initial_state is None:
        initial_state = jnp.zeros((n_batch, n_heads, b_BTN.shape[-1], n_value), acc)
    if seq_len == 1 and return_state and implementation is None:  # decoding
        dt_BH = jnp.ones((1, 1), acc) if dt_BTH is None else dt_BTH[:, 0].astype(acc)
        log_a_BH = jnp.maximum(log_a_BTH[:, 0].astype(acc), FLOOR)
        y_BHV, state_BHNV = _step(x_BTHV[:, 0], log_a_BH, b_BTN[:, 0], c_BTN[:, 0], dt_BH, initial_state.astype(acc))
        return y_BHV[:, None], state_BHNV
    y_BTHV, state_BHNV = kernels_pallas.ssd(
        time_to_heads(x_BTHV),
        jnp.maximum(time_to_heads(log_a_BTH).astype(acc), FLOOR),
        gather_time(b_BTN),
        gather_time(c_BTN),
        initial_state.astype(acc),
        None if dt_BTH is None else time_to_heads(dt_BTH).astype(acc),
        chunk_size=min(chunk_size or CHUNK, seq_len),
        implementation=implementation,
    )
    y_BTHV = heads_to_time(y_BTHV)
    return (y_BTHV, state_BHNV) if return_state else y_BTHV


def _step(x_BHV: Array, log_a_BH: Array, b_BN: Array, c_BN: Array, dt_BH: Array, s_BHNV: Array) -> tuple[Array, Array]:
    """Return the output and the state of one token.

    It avoids the chunked form's matrix products, which would have one row: a decoding step reads and writes the state
    once.
    """
    acc = s_BHNV.dtype
    x_BH1V = (x_BHV.astype(acc) * dt_BH[..., None])[:, :, None]
    b_B1N1, c_B1N1 = b_BN.astype(acc)[:, None, :, None], c_BN.astype(acc)[:, None, :, None]
    s_BHNV = jnp.exp(log_a_BH)[..., None, None] * s_BHNV + b_B1N1 * x_BH1V
    return jnp.sum(c_B1N1 * s_BHNV, axis=2).astype(x_BHV.dtype), s_BHNV
