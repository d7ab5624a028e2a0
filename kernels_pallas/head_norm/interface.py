"""Interface of the head-norm backends."""

from typing import NamedTuple, Protocol, runtime_checkable

from jax import Array


class Call(NamedTuple):
    """Static options of `api.head_norm`."""

    activation: str
    gate_first: bool
    eps: float
    with_input: bool = False
    dtype: str | None = None  # dtype of y; None is the dtype of x


@runtime_checkable
class HeadNorm(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

    def run(
        self,
        x_BTHV: Array,
        gate_BTHV: Array | None,
        skip: tuple[Array, Array] | None,
        gain_HV: Array,
        bias_HV: Array | None,
        call: Call,
    ) -> Array | tuple[Array, Array]:
        """Return y_BTHV, or (x, y) with `call.with_input`; operands: `api.head_norm`.

        y has the dtype `call.dtype`, or the dtype of `x_BTHV` if that is None.
        """
        ...
