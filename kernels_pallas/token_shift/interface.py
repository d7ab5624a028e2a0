"""Interface of the token-shift backends."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class TokenShift(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

    def run(
        self,
        x_BTD: Array,
        last_BD: Array | None,
        mus: tuple[Array, ...],
        moves_NBTD: Array | None,
        reach_BT: Array | None = None,
    ) -> tuple[Array, ...]:
        """Return the interpolations for operands as in `api.token_shift`.

        `mus` are float32 or wider. Where `reach_BT`, int32, is 0, the previous input is zero.
        """
        ...
