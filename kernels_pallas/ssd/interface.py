"""The interface of every backend of Mamba-2's recurrence."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class Ssd(Protocol):
    """The recurrence, differentiable: the xla backend by JAX, the Triton kernels by a rule beside them."""

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
        """Return (y_BTHV, the last state). Operands as in `api.ssd`."""
        ...
