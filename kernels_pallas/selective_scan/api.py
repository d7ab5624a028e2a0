"""Mamba-1's selective scan as a differentiable op with interchangeable backends.

    h_t[e, n] = exp(dt_t[e] A[e, n]) h_{t-1}[e, n] + dt_t[e] x_t[e] B_t[n]
    y_t[e] = sum_n C_t[n] h_t[e, n] + D[e] x_t[e]

The backward pass keeps the inputs and some states, and recomputes the states in between. It goes from the last token to
the first with the state gradient L, which starts as the gradient of the last state:

    L += dy_t C_t^T;  dC_t = sum_e dy_t h_t;  ddt_t = sum_n L (h_{t-1} a_t A + x_t B_t);  dA += L h_{t-1} a_t dt_t
    dB_t = sum_e L dt_t x_t;  dx_t = sum_n L dt_t B_t + D dy_t;  L <- L a_t                   with a_t = exp(dt_t A)

Source: Mamba-1, arXiv 2312.00752, algorithm 2. Reverse mode only, once: neither `jvp` nor a second derivative is
defined.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.selective_scan import triton, xla
from kernels_pallas.selective_scan.interface import SelectiveScan, SelectiveScanOfSoftplus, step_sizes

BACKENDS = (triton.BACKEND, xla.BACKEND)


class Call(NamedTuple):
    """Static options for a call."""

    kernels: SelectiveScan
    chunk_size: int | None


def selective_scan(
    x_BTE: Float[Array, "B T E"],
    dt_BTE: Float[Array, "B T E"],
    A_EN: Float[Array, "E N"],
    B_BTN: Float[Array, "B T N"],
    C_BTN: Float[Array, "B T N"],
    D_E: Float[Array, "E"],
    initial_BEN: Float[Array, "B E N"],
    *,
    dt_bias_E: Float[Array, "E"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B E N"]]:
    """Return the outputs at all positions and the state after the last position.

    Args:
      x_BTE: inputs; fp32, bf16 or fp16 (fp64 under x64), any T >= 1.
      dt_BTE: step sizes >= 0, in the dtype of `A_EN`.
      A_EN: <= 0; fp32 (fp64). All arithmetic uses this dtype.
      B_BTN: input weights per state; fp32, bf16 or fp16 (fp64).
      C_BTN: output weights per state; fp32, bf16 or fp16 (fp64).
      D_E: skip weights, in the dtype of `A_EN`.
      initial_BEN: state before the first position, in the dtype of `A_EN`.
      dt_bias_E: optional bias in the dtype of `A_EN`. With it the step sizes are softplus(dt_BTE + dt_bias_E), computed
        inside the scan, and `dt_BTE` may also be bf16 or fp16.
      chunk_size: positions per chunk in the xla backend; it does not change the result. None: the backend chooses.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      (y_BTE in the dtype of `x_BTE`, last_BEN in the dtype of `A_EN`).

    Raises:
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: arXiv 2312.00752, algorithm 2.
    """
    step_sizes_BTE = dt_BTE if dt_bias_E is None else jax.ShapeDtypeStruct(dt_BTE.shape, A_EN.dtype)
    shared = (A_EN, B_BTN, C_BTN, D_E, initial_BEN)
    kernels = backend.pick("selective_scan", BACKENDS, implementation, (x_BTE, step_sizes_BTE, *shared), {})
    biases = () if dt_bias_E is None else (dt_bias_E,)
    out: Any = _scan(vary_alike(x_BTE, dt_BTE, *shared, *biases), Call(kernels, chunk_size))
    return out


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scan(arrays: tuple[Array, ...], call: Call) -> tuple[Array, Array]:
    return _run_forward(arrays, call, keep=False)[:2]


def _run_forward(arrays: tuple[Array, ...], call: Call, *, keep: bool) -> tuple[Array, Array, Array]:
    x, dt, *shared, bias = arrays if len(arrays) == 8 else (*arrays, None)
    if bias is not None and isinstance(call.kernels, SelectiveScanOfSoftplus):
        return call.kernels.forward(x, dt, *shared, chunk_size=call.chunk_size, keep=keep, dt_bias_E=bias)
    return call.kernels.forward(x, step_sizes(dt, bias), *shared, chunk_size=call.chunk_size, keep=keep)


def _forward(arrays: tuple[Array, ...], call: Call):
    y, last, kept = _run_forward(arrays, call, keep=True)
    return (y, last), (arrays[:6], arrays[7:], kept)


def _backward(call: Call, saved: tuple, cotangents: tuple[Array, Array]) -> tuple[tuple[Array, ...]]:
    (x, dt, *shared), biases, kept = saved
    rest: Any = (*shared, kept, *cotangents)
    if not biases:
        return (call.kernels.backward(x, dt, *rest, chunk_size=call.chunk_size),)
    if isinstance(call.kernels, SelectiveScanOfSoftplus):
        return (call.kernels.backward(x, dt, *rest, chunk_size=call.chunk_size, dt_bias_E=biases[0]),)
    sizes, pull = jax.vjp(step_sizes, dt, *biases)
    dx, d_sizes, *others = call.kernels.backward(x, sizes, *rest, chunk_size=call.chunk_size)
    ddt, d_bias = pull(d_sizes)
    return ((dx, ddt, *others, d_bias),)


_scan.defvjp(_forward, _backward)
