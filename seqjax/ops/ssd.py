"""Linear recurrence with one decay per head (state space duality), in chunks.

    S_t = a_t S_{t-1} + b_t x_t^T,   y_t = c_t S_t        S [N, V] per head; b and c per head or shared by all heads

See Dao and Gu, arXiv 2405.21060 (Mamba-2), section 6. Decays, states and sums are float32; products use the dtype of
`x_BTHV`. `kernels_pallas/ssd` has the chunked form, its gradient, and the XLA and Triton backends. Memory is linear in
T: the backward pass needs the inputs and, with Triton, the states at chunk starts.
"""

import jax.numpy as jnp
from jaxtyping import Float, Int

import kernels_pallas
from kernels_pallas import accumulation_dtype
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 128
# A decay of e^-60 is negligible in float32. With smaller decays, differences between sums of log a would lose
# precision.
FLOOR = -60.0


def ssd(
    x_BTHV: Float[Array, "B T H V"],
    log_a_BTH: Float[Array, "B T H"],
    b_BTN: Float[Array, "B T *G N"],
    c_BTN: Float[Array, "B T *G N"],
    *,
    dt_BTH: Float[Array, "B T H"] | None = None,
    initial_state: Float[Array, "B H N V"] | None = None,
    return_state: bool = False,
    segments: Int[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H N V"]]:
    """Return the outputs and, with `return_state`, the final state.

    The outputs have the dtype of `x_BTHV`, the state is float32. `x_BTHV` must be multiplied by its step size, unless
    `dt_BTH` is passed. `log_a_BTH` is at most 0; pass it in float32. `b_BTN` and `c_BTN` may be [B, T, H, N], with
    separate values per head. The result does not depend on `chunk_size` (default 128, at most T). `segments` and
    `implementation` are as in `kernels_pallas`.
    """
    y_BTHV, state_BHNV = ssd_of_heads(
        time_to_heads(x_BTHV),
        time_to_heads(log_a_BTH),
        *(time_to_heads(x) if x.ndim == 4 else gather_time(x) for x in (b_BTN, c_BTN)),
        dt_BTH=None if dt_BTH is None else time_to_heads(dt_BTH),
        initial_state=initial_state,
        segments=None if segments is None else gather_time(segments),
        chunk_size=chunk_size,
        implementation=implementation,
    )
    y_BTHV = heads_to_time(y_BTHV)
    return (y_BTHV, state_BHNV) if return_state else y_BTHV


def ssd_of_heads(
    x_BTHV: Float[Array, "B T H V"],
    log_a_BTH: Float[Array, "B T H"],
    b_BTN: Float[Array, "B T *G N"],
    c_BTN: Float[Array, "B T *G N"],
    *,
    dt_BTH: Float[Array, "B T H"] | None = None,
    initial_state: Float[Array, "B H N V"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H N V"]]:
    """Return the outputs and state of `ssd` for operands that are not split along T.

    A mixer with operands that depend on the whole past calls `time_to_heads` and `gather_time` before, and
    `heads_to_time` on the outputs.
    """
    n_batch, seq_len, n_heads, n_value = x_BTHV.shape
    acc = accumulation_dtype(x_BTHV, log_a_BTH)
    if initial_state is None:
        initial_state = jnp.zeros((n_batch, n_heads, b_BTN.shape[-1], n_value), acc)
    log_a_BTH, initial_state = jnp.maximum(log_a_BTH.astype(acc), FLOOR), initial_state.astype(acc)
    dt_BTH = None if dt_BTH is None else dt_BTH.astype(acc)
    if seq_len == 1 and implementation is None:  # decoding
        dt_BH = jnp.ones((1, 1), acc) if dt_BTH is None else dt_BTH[:, 0]
        y_BHV, state_BHNV = _step(x_BTHV[:, 0], log_a_BTH[:, 0], b_BTN[:, 0], c_BTN[:, 0], dt_BH, initial_state)
        return y_BHV[:, None], state_BHNV
    return kernels_pallas.ssd(
        x_BTHV,
        log_a_BTH,
        b_BTN,
        c_BTN,
        initial_state,
        dt_BTH,
        segments=segments,
        chunk_size=min(chunk_size or CHUNK, seq_len),
        implementation=implementation,
    )


def _step(x_BHV: Array, log_a_BH: Array, b_BN: Array, c_BN: Array, dt_BH: Array, s_BHNV: Array) -> tuple[Array, Array]:
    """Return the output and the state of one token.

    The chunked form's matrix products would have one row. This form reads and writes the state once.
    """
    acc = s_BHNV.dtype
    x_BH1V = (x_BHV.astype(acc) * dt_BH[..., None])[:, :, None]
    b_BHN1, c_BHN1 = ((x if x.ndim == 3 else x[:, None]).astype(acc)[..., None] for x in (b_BN, c_BN))
    s_BHNV = jnp.exp(log_a_BH)[..., None, None] * s_BHNV + b_BHN1 * x_BH1V
    return jnp.sum(c_BHN1 * s_BHNV, axis=2).astype(x_BHV.dtype), s_BHNV
