"""Mamba-2's recurrence (SSD), a differentiable op with interchangeable backends.

    S_t = a_t S_{t-1} + b_t (dt_t x_t)^T,   y_t = c_t S_t        S [N, V] per head, b and c shared by the heads, or not

Source: Dao and Gu, arXiv 2405.21060, section 6; chunked form in `xla.py`. Let L be the gradient of the state after a
chunk, dP = dY X^T, dS_ij = dP_ij G_ij dt_j and W = dS * (C B^T). The gradients are, summed over heads where heads
share:

    dX = dt * (((C B^T) * G)^T dY + e^{g_end - g} * (B L))     ddt = rowsum(X * dX) / dt
    dC = dS B + dC',   dC' = e^g * (dY S^T)                    dB = dS^T C + dB',   dB' = dt e^{g_end - g} * (X L^T)
    L <- e^{g_end} L + (C * e^g)^T dY
    dg = rowsum(W) + rowsum(C * dC') - colsum(W) - rowsum(B * dB')
    dg_end += sum(B * dB') + e^{g_end} <L, S>

The xla backend is array code that JAX differentiates. The triton backend defines these gradients itself, in reverse
mode and once. The scores C B^T are computed once for all heads, or per head if each head has its own b and c.
"""

from jaxtyping import Array, Float, Int

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.segments import check_segments, first_tokens, reset_decays
from kernels_pallas.ssd import triton, xla

BACKENDS = (triton.BACKEND, xla.BACKEND)


def ssd(
    x_BTHV: Float[Array, "B T H V"],
    log_a_BTH: Float[Array, "B T H"],
    b_BTN: Float[Array, "B T *G N"],
    c_BTN: Float[Array, "B T *G N"],
    initial_BHNV: Float[Array, "B H N V"],
    dt_BTH: Float[Array, "B T H"] | None = None,
    *,
    segments: Int[Array, "B T"] | None = None,
    chunk_size: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H N V"]]:
    """Return the outputs at all positions and the state after the last position.

    Args:
      x_BTHV: inputs; fp32, bf16 or fp16 (fp64 under x64), any T >= 1. Matrix products use this dtype.
      log_a_BTH: log decays, <= 0; fp32 (fp64), the dtype of all sums.
      b_BTN: input weights per state, shared by all heads, or [B, T, H, N] per head; rounded to the dtype of `x_BTHV`.
      c_BTN: output weights per state, same shape and rounding as `b_BTN`.
      initial_BHNV: state before the first position, in the dtype of `log_a_BTH`.
      dt_BTH: factors of `x_BTHV`, in the dtype of `log_a_BTH`; None means 1.
      segments: the number of each token's document, integers [B, T] that do not decrease along T; None means one
        document. The state is zero before each later document.
      chunk_size: positions per chunk. It does not change the result; triton uses at most 128 (fp32: 64).
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      (y_BTHV in the dtype of `x_BTHV`, last_BHNV in the dtype of `log_a_BTH`).

    Raises:
      ValueError: segments of another shape.
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: arXiv 2405.21060, section 6.
    """
    check_segments(segments, *x_BTHV.shape[:2])
    if segments is not None:
        log_a_BTH = reset_decays(log_a_BTH, first_tokens(segments))
    arrays = (x_BTHV, log_a_BTH, b_BTN.astype(x_BTHV.dtype), c_BTN.astype(x_BTHV.dtype), initial_BHNV)
    operands = arrays if dt_BTH is None else (*arrays, dt_BTH)
    kernels = backend.pick("ssd", BACKENDS, implementation, operands, {"chunk_size": chunk_size})
    x, log_a, b, c, initial, *dt = vary_alike(*operands)
    return kernels.run(x, log_a, b, c, initial, dt[0] if dt else None, chunk_size=chunk_size)
