"""Interface of the Top-1 Element backends: attention and decoding step."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class ElementAttention(Protocol):
    """The attention and its gradient."""

    def evaluate(self, q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> Array:
        """Return o_BTHV without computing the softmax or its product with v."""
        ...

    def forward(self, q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> tuple[Array, Array, Array]:
        """Return (index_BTH int32, lse_BTH, soft_BTHV).

        The index is the best key. The log-sum-exp and the softmax output are for the backward pass.
        """
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
    """Attend from one new token to a cache."""

    def decode(self, q_BHK: Array, k_BSGK: Array, v_BSGV: Array, length: Array) -> Array:
        """Return o_BHV, bit for bit a row of v.

        It needs no scale, because a positive scale does not change the argmax.
        """
        ...
