"""The interface of every backend of Top-1 Element attention and its decoding step."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class ElementAttention(Protocol):
    """The attention and its gradient."""

    def evaluate(self, q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> Array:
        """Return o_BTHV alone, without the softmax and its product with v."""
        ...

    def forward(self, q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> tuple[Array, Array, Array]:
        """Return (index_BTH int32, lse_BTH, soft_BTHV): the best key, and the softmax output for the backward pass."""
        ...

    def take_values(self, v_BTGV: Array, index_BTH: Array) -> Array:
        """Return o_BTHV = v[index], exactly."""
        ...

    def backward(
        self,
        q_BTHK: Array,
        k_BTGK: Array,
        v_BTGV: Array,
        index_BTH: Array,
        lse_BTH: Array,
        soft_BTHV: Array,
        do_BTHV: Array,
        *,
        scale: float,
        v_grad: str,
    ) -> tuple[Array, Array, Array]:
        """Return (dq, dk, dv), each in the layout and dtype of its primal."""
        ...


@runtime_checkable
class ElementDecoding(Protocol):
    """Attention of a new token to a cache."""

    def decode(self, q_BHK: Array, k_BSGK: Array, v_BSGV: Array, length: Array) -> Array:
        """Return o_BHV, bit for bit a row of v. The scale does not move an argmax."""
        ...
