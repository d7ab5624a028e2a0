"""Interface of the selective-scan backends."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
from jax import Array


@runtime_checkable
class SelectiveScan(Protocol):
    """The scan and its gradient; operands as in `api.selective_scan`."""

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
        """Return (y_BTE, last state, states that `backward` starts from).

        The third result is valid only with `keep`. Kernels whose tiles fix the chunks ignore `chunk_size`.
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
    """A `SelectiveScan` that computes the step sizes itself.

    Its functions have one more keyword, `dt_bias_E`. If it is not None, the step sizes are softplus(dt + dt_bias), dt
    may have any input dtype, and `backward` returns the bias gradient last.
    """

    has_softplus: bool
    forward: Callable[..., tuple[Array, Array, Array]]
    backward: Callable[..., tuple[Array, ...]]


def step_sizes(dt_BTE: Array, dt_bias_E: Array | None) -> Array:
    """Return softplus(dt + dt_bias) in the dtype of the bias; without a bias, dt."""
    return dt_BTE if dt_bias_E is None else jax.nn.softplus(dt_BTE.astype(dt_bias_E.dtype) + dt_bias_E)
