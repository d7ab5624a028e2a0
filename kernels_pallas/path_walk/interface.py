"""The interface of every backend of the walk of PaTH's queries over the chunks before them."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class PathWalk(Protocol):
    """The walk, differentiable: the xla backend by JAX, the Triton kernels by a rule beside them."""

    def run(
        self,
        q_cBHCK: Array,
        k_cBHCK: Array,
        v_cBHCV: Array,
        product_cBHKK: Array,
        forgotten_cBHC: Array | None,
        own_cBHCV: Array,
        lse_cBHC: Array,
    ) -> Array:
        """Return o_cBHCV, float32. Operands as in `api.path_walk`."""
        ...
