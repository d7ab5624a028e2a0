"""The interface of every backend of the selective scan."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class SelectiveScan(Protocol):
    """The scan and its gradient. Operands as in `api.selective_scan`."""

    def forward(
        self,
        x_BTE: Array,
        dt_BTE: Array,
        A_EN: Array,
        B_BTN: Array,
        C_BTN: Array,
        D_E: Array,
        initial_BEN: Array,
        *,
        chunk_size: int | None,
        keep: bool,
    ) -> tuple[Array, Array, Array]:
        """Return (y_BTE, the last state, states that `backward` starts from, of use only with `keep`).

        `chunk_size` is advice: kernels whose chunks are fixed by their tiles do without it.
        """
        ...

    def backward(
        self,
        x_BTE: Array,
        dt_BTE: Array,
        A_EN: Array,
        B_BTN: Array,
        C_BTN: Array,
        D_E: Array,
        kept: Array,
        dy_BTE: Array,
        d_last_BEN: Array,
        *,
        chunk_size: int | None,
    ) -> tuple[Array, ...]:
        """Return the gradients of x, dt, A, B, C, D and the initial state."""
        ...
