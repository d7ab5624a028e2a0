"""Interface of the SSD (Mamba-2) backends."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class Ssd(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

    def run(
        self,
        x_BTHV: Array,
        log_a_BTH: Array,
        b_BTN: Array,
        c_BTN: Array,
        initial_BHNV: Array,
        dt_BTH: Array | None,
        *,
        chunk_size: int,
    ) -> tuple[Array, Array]:
        """Return (y_BTHV, last state) for operands as in `api.ssd`."""
        ...
