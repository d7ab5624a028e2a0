"""Operands, results and the interface of the backends."""

from typing import NamedTuple, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Bool, Float


class LowRank(NamedTuple):
    """A low-rank map, bias + hidden matrix, before its activation."""

    hidden_BTR: Float[Array, "B T R"]
    matrix_RD: Float[Array, "R D"]
    bias_D: Float[Array, "D"]


class Vectors(NamedTuple):
    """Parameter vectors.

    k_k: factors of the removal key; k_a: weight of eta in the key; r_k: factors of the bonus.
    """

    k_k_D: Float[Array, "D"]
    k_a_D: Float[Array, "D"]
    r_k_D: Float[Array, "D"]


class ValueMix(NamedTuple):
    """The first layer's values, their weight, and whether this is the first layer.

    The first layer keeps its own values.
    """

    first_BTHK: Float[Array, "B T H K"]
    share: LowRank
    is_first_layer: Bool[Array, ""]


class Operands(NamedTuple):
    """Operands of `linear_attention` and `head_norm`'s skip, and first-layer values.

    r and `first_BTHK` are passed through, and the values occur twice, in `v_BTHK` and `skip`. The backward kernel then
    adds the gradients of these results itself, without extra passes over memory.
    """

    r_BTHK: Float[Array, "B T H K"]
    k_BTHK: Float[Array, "B T H K"]
    v_BTHK: Float[Array, "B T H K"]
    log_w_BTHK: Float[Array, "B T H K"]
    a_BTHK: Float[Array, "B T H K"]
    b_BTHK: Float[Array, "B T H K"]
    skip: tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]
    first_BTHK: Float[Array, "B T H K"] | None


@runtime_checkable
class Wkv7Operands(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

    def run(
        self,
        r_BTHK: Array,
        k_BTHK: Array,
        v_BTHK: Array,
        decay: LowRank,
        eta: LowRank,
        vectors: Vectors,
        mix: ValueMix | None,
    ) -> Operands:
        """Return the operands for arguments as in `api.wkv7_operands`.

        Biases and vectors are float32 or wider.
        """
        ...
