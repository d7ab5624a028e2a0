"""Interface of the delta-rule backends."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class DeltaRule(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

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
        """Return (o_BTHV, last state) for operands as in `api.delta_rule`."""
        ...
