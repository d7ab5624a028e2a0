"""The interface of every backend of the norm per head with its gate."""

from typing import NamedTuple, Protocol, runtime_checkable

from jax import Array


class Call(NamedTuple):
    """The static options of `api.head_norm`."""

    activation: str
    gate_first: bool
    eps: float
    with_input: bool = False
    dtype: str | None = None  # of y beside x; None is that of x


@runtime_checkable
class HeadNorm(Protocol):
    """The norm, differentiable: the xla backend by JAX, the Triton kernels by a rule beside them."""

    def run(
        self,
        x_BTHV: Array,
        gate_BTHV: Array | None,
        skip: tuple[Array, Array] | None,
        gain_HV: Array,
        bias_HV: Array | None,
        call: Call,
    ) -> Array | tuple[Array, Array]:
        """Return y_BTHV in the dtype of `x_BTHV`, or x and y in that of the call. Operands as in `api.head_norm`."""
        ...
