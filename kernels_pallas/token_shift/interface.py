"""The interface of every backend of the token shift."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class TokenShift(Protocol):
    """The token shift, differentiable: the xla backend by JAX, the Triton kernels by a rule beside them."""

    def run(
        self, x_BTD: Array, last_BD: Array | None, mus: tuple[Array, ...], moves_NBTD: Array | None
    ) -> tuple[Array, ...]:
        """Return the interpolations. Operands as in `api.token_shift`, `mus` in at least float32."""
        ...
