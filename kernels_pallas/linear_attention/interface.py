"""The interface of every backend of linear attention with a decay per channel."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class LinearAttention(Protocol):
    """The recurrence, differentiable: the xla backend by JAX, the Triton kernels by a rule beside them."""

    def run(
        self,
        r_BTHK: Array,
        k_BTHK: Array,
        v_BTHV: Array,
        log_w_BTHK: Array,
        u_HK: Array | None,
        a_BTHK: Array | None,
        b_BTHK: Array | None,
        initial_BHKV: Array,
        *,
        chunk_size: int,
    ) -> tuple[Array, Array]:
        """Return (o_BTHV, the last state). Operands as in `api.linear_attention`."""
        ...
