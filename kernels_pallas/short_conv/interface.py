"""The interface of every backend of the short convolution."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class ShortConv(Protocol):
    """The convolution, differentiable: either backend by a rule beside it."""

    def run(
        self,
        x_BTE: Array,
        w_EW: Array,
        b_E: Array | None,
        last_BWE: Array | None,
        *,
        silu: bool,
        l2_heads: int | None,
        scale: float,
        eps: float,
    ) -> Array:
        """Return y_BTE. Operands as in `api.short_conv`, taps and bias in the dtype of the arithmetic."""
        ...
