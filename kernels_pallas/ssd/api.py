"""Mamba-2's recurrence as a differentiable function over interchangeable backends.

    S_t = a_t S_{t-1} + b_t (dt_t x_t)^T,   y_t = c_t S_t        S [N, V] per head, b and c shared by the heads, or not

Dao and Gu, arXiv 2405.21060, section 6; in chunks as `xla.py` says. With L the gradient of the state after a chunk,
dP = dY X^T and dS_ij = dP_ij G_ij dt_j, the gradients are, summed over heads where heads share:

    dX = dt * (((C B^T) * G)^T dY + e^{g_end - g} * (B L))          ddt = rowsum(X * dX) / dt
    dC = dS B + e^g * (dY S^T)                                      dB = dS^T C + dt e^{g_end - g} * (X L^T)
    L <- e^{g_end} L + (C * e^g)^T dY

and g gets, as a query, rowsums of dS * (C B^T) and of C times the second term of dC; as a key the negative of column
sums of the former and of B times the second term of dB, whose total g_end gets, with e^{g_end} <L, S>.

xla is plain array code; triton defines its derivative itself, for reverse mode, once. The scores C B^T are made once
for all heads, or for each head where each has its own b and c.
"""

from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
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
    chunk_size: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H N V"]]:
    """Return the outputs of all positions, and the state after the last.

    Args:
      x_BTHV: inputs, fp32, bf16 or fp16 (fp64 under x64); any T >= 1. Products are made in its dtype.
      log_a_BTH: logarithms of the decays, <= 0, in fp32 (fp64), the dtype of all sums.
      b_BTN: input weights of each state, rounded to the dtype of `x_BTHV`; of all heads, or [B, T, H, N] of each.
      c_BTN: output weights of each state, likewise.
      initial_BHNV: the state before the first position, in the dtype of `log_a_BTH`.
      dt_BTH: factors of `x_BTHV`, in the dtype of `log_a_BTH`; None is 1.
      chunk_size: positions per chunk, which the result does not depend on; triton takes at most 128 (fp32: 64).
      implementation: None picks the best backend that can run this; a name gets that one or an error.

    Returns:
      (y_BTHV in the dtype of `x_BTHV`, last_BHNV in that of `log_a_BTH`).

    Raises:
      BackendError: (a ValueError) the named implementation cannot run this.

    Source: arXiv 2405.21060, section 6.
    """
    arrays = (x_BTHV, log_a_BTH, b_BTN.astype(x_BTHV.dtype), c_BTN.astype(x_BTHV.dtype), initial_BHNV)
    operands = arrays if dt_BTH is None else (*arrays, dt_BTH)
    kernels = backend.pick("ssd", BACKENDS, implementation, operands, {"chunk_size": chunk_size})
    x, log_a, b, c, initial, *dt = vary_alike(*operands)
    return kernels.run(x, log_a, b, c, initial, dt[0] if dt else None, chunk_size=chunk_size)
