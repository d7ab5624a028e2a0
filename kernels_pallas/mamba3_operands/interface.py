"""Results and the interface of the backends."""

from typing import NamedTuple, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Float


class Operands(NamedTuple):
    """Operands of `ssd`, the own token's products, and the last angles in turns."""

    k_BTHN: Float[Array, "B T H N"]
    q_BTHN: Float[Array, "B T H N"]
    own_BTH: Float[Array, "B T H"]
    turns_BHR: Float[Array, "B H R"]


@runtime_checkable
class Mamba3Operands(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

    def run(
        self,
        b_BTN: Array,
        c_BTN: Array,
        turn_BTR: Array,
        dt_BTH: Array,
        b_bias_HN: Array,
        c_bias_HN: Array,
        before_BN: Array,
        start_BHR: Array,
    ) -> Operands:
        """Return the operands for arguments as in `api.mamba3_operands`.

        Turns, step sizes and biases are float32 or wider.
        """
        ...
