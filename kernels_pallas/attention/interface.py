"""The interface of every backend of causal attention."""

from typing import Protocol, runtime_checkable

from jax import Array
from jax.sharding import PartitionSpec


@runtime_checkable
class CausalAttention(Protocol):
    """Softmax attention over the past, differentiable."""

    def attend(
        self,
        q_BTHK: Array,
        k_BTGK: Array,
        v_BTGK: Array,
        log_f_BTH: Array | None = None,
        *,
        window: int,
        scale: float,
        slopes: tuple[float, ...],
        split: PartitionSpec | None,
    ) -> Array:
        """Return o_BTHK. Operands as in `api.causal_attention`; `split` is for kernels without a sharding rule."""
        ...
