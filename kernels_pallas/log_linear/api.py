"""Log-linear attention, a differentiable op with interchangeable backends.

    y_t = sum over s <= t of m_t^(l(t, s)) exp(g_t - g_s) (c_t . b_s) x_s,   g the running sum of log a
    l(t, s) = 0 for s = t, else 1 + the number of the highest bit in which t and s differ, at most L - 1

Guo et al., arXiv 2506.04761. Chunks of Q positions, Q a power of two, are the tree's blocks of level log2(Q). Chunk i
reads one earlier block of 2^k chunks for every set bit k of i. The block ends before chunk (i >> k) << k. Let S_k be
its state at its end, r_k the summed log decay from there to the start of chunk i, and g the sum within chunk i:

    Y = ((C B^T) * G * M) X + sum over k of m_k e^{r_k + g} * (C S_k),   G_ij = e^{g_i - g_j} for j <= i, else 0

Let dS be the gradient of all later outputs with respect to the state at the end of chunk i, dP = dY X^T, and
W = dP * G * M * (C B^T). One dS per chunk suffices, because decays do not depend on the level:

    dX = ((C B^T) * G * M)^T dY + e^{g_end - g} * (B dS)
    dC = (dP * G * M) B + sum over k of m_k e^{r_k + g} * (dY S_k^T)
    dB = (dP * G * M)^T C + e^{g_end - g} * (X dS^T)
    dm_k = e^{r_k + g} rowsum(C * (dY S_k^T)), and within chunks the row sums of dP * G * (C B^T) over each level
    dS = sum over clear bits k of i of A_k e^{decay from i to the block's end}
    A_k = sum over the chunks that read the block of (m_k e^{r_k + g} * C)^T dY

The xla backend is array code that JAX differentiates. The triton backend defines these gradients itself, in reverse
mode and once. The heads share b and c.
"""

from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.log_linear import triton, xla

BACKENDS = (triton.BACKEND, xla.BACKEND)


def log_linear(
    x_BTHV: Float[Array, "B T H V"],
    log_a_BTH: Float[Array, "B T H"],
    b_BTN: Float[Array, "B T N"],
    c_BTN: Float[Array, "B T N"],
    m_BTHL: Float[Array, "B T H L"],
    *,
    chunk_size: int,
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """Return the outputs of a sequence from its first token.

    Args:
      x_BTHV: inputs; fp32, bf16 or fp16 (fp64 under x64), any T >= 1. Matrix products use this dtype.
      log_a_BTH: log decays, <= 0; fp32 (fp64), the dtype of all sums.
      b_BTN: input weights per state, shared by all heads.
      c_BTN: output weights per state, same shape as `b_BTN`.
      m_BTHL: weights of the levels, in the dtype of `log_a_BTH`. Blocks of 2^(L - 2) positions or more share the last.
      chunk_size: positions per chunk, rounded down to a power of two. It does not change the result; triton uses 16 to
        64 (fp32: 32).
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      y_BTHV in the dtype of `x_BTHV`.

    Raises:
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: arXiv 2506.04761.
    """
    operands = (x_BTHV, log_a_BTH, b_BTN, c_BTN, m_BTHL)
    options = {"chunk_size": min(chunk_size, x_BTHV.shape[1])}
    kernels = backend.pick("log_linear", BACKENDS, implementation, operands, options)
    return kernels.run(*vary_alike(*operands), chunk_size=chunk_size)
