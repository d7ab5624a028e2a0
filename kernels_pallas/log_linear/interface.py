"""Interface of the log-linear attention backends."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class LogLinear(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

    def run(
        self, x_BTHV: Array, log_a_BTH: Array, b_BTN: Array, c_BTN: Array, m_BTHL: Array, *, chunk_size: int
    ) -> Array:
        """Return y_BTHV for operands as in `api.log_linear`."""
        ...
