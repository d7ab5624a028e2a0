"""Operands and results of the op, and the interface of every backend."""

from typing import NamedTuple, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Bool, Float


class LowRank(NamedTuple):
    """A low-rank map, bias + hidden matrix, before what is made of it."""

    hidden_BTR: Float[Array, "B T R"]
    matrix_RD: Float[Array, "R D"]
    bias_D: Float[Array, "D"]


class Vectors(NamedTuple):
    """Factors of the key that is removed, share of eta in the key, and factors of the bonus."""

    k_k_D: Float[Array, "D"]
    k_a_D: Float[Array, "D"]
    r_k_D: Float[Array, "D"]


class ValueMix(NamedTuple):
    """The first layer's values, which share is theirs, and whether this is the first layer, whose values stay."""

    first_BTHK: Float[Array, "B T H K"]
    share: LowRank
    is_first_layer: Bool[Array, ""]


class Operands(NamedTuple):
    """The operands of `linear_attention`, those of `head_norm`'s skip, and the first layer's values for the next layer.

    r and the first layer's values are those that were given, and the values stand in both places: what returns through
    each of them is added where the gradients are made, and not in passes over memory.
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
    """The op, differentiable: the xla backend by JAX, the Triton kernels by a rule beside them."""

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
        """Return the operands. Arguments as in `api.wkv7_operands`, biases and vectors in at least float32."""
        ...
