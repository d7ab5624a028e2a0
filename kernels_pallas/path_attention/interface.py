"""Interface of the backends for PaTH attention."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class PathAttention(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

    def run(
        self,
        q_BTHK: Array,
        k_BTGK: Array,
        v_BTGV: Array,
        w_BTGK: Array,
        beta_BTG: Array,
        log_f_BTH: Array | None,
        *,
        chunk_size: int,
    ) -> Array:
        """Return o_BTHV in the dtype of q for operands as in `api.path_attention`."""
        ...
