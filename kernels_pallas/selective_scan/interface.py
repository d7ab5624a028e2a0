"""The interface of every backend of the selective scan."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
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


@runtime_checkable
class SelectiveScanOfSoftplus(Protocol):
    """A `SelectiveScan` that also makes the step sizes, for which its functions have one keyword more.

    `dt_bias_E`: None, or dt comes in any dtype of x and counts as softplus(dt + dt_bias). `backward` then returns the
    gradient of the bias last.
    """

    has_softplus: bool
    forward: Callable[..., tuple[Array, Array, Array]]
    backward: Callable[..., tuple[Array, ...]]


def step_sizes(dt_BTE: Array, dt_bias_E: Array | None) -> Array:
    """Return softplus(dt + dt_bias) in the dtype of the bias; dt itself without one."""
    return dt_BTE if dt_bias_E is None else jax.nn.softplus(dt_BTE.astype(dt_bias_E.dtype) + dt_bias_E)
