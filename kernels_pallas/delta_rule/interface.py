"""The interface of every backend of the delta rule."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class DeltaRule(Protocol):
    """The recurrence, differentiable: the xla backend by JAX, the Triton kernels by a rule beside them."""

    def run(
        self,
        q_BTHK: Array,
        k_BTHK: Array,
        v_BTHV: Array,
        beta_BTH: Array,
        log_g_BTH: Array | None,
        initial_BHKV: Array,
        *,
        chunk_size: int,
    ) -> tuple[Array, Array]:
        """Return (o_BTHV, the last state). Operands as in `api.delta_rule`."""
        ...
