"""Interface of the short-convolution backends."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class ShortConv(Protocol):
    """Differentiable backend; both backends define a custom VJP."""

    def run(
        self,
        x_BTE: Array,
        w_EW: Array,
        b_E: Array | None,
        last_BWE: Array | None,
        reach_BT: Array | None = None,
        *,
        silu: bool,
        l2_heads: int | None,
        scale: float,
        eps: float,
    ) -> Array:
        """Return y_BTE for operands as in `api.short_conv`.

        Taps and bias have the dtype of the arithmetic. A token reads only the `reach_BT` previous inputs, int32.
        """
        ...
