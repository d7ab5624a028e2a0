"""Interface of the backends for PaTH's walk over earlier chunks."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class PathWalk(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

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
        """Return o_cBHCV in float32 for operands as in `api.path_walk`."""
        ...
