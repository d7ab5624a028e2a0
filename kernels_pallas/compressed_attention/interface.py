"""Interface of the backends of the compressed attention."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class CompressedAttention(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

    def run(
        self,
        q_BTHK: Array,
        k_mean_BcGK: Array,
        v_mean_BcGV: Array,
        positions_T: Array | None,
        *,
        block_size: int,
        top_k: int,
    ) -> tuple[Array, Array]:
        """Return (o_BTHV, sel_BTGn) as `api.compressed_attention`, for at least one block and top_k <= c."""
        ...
