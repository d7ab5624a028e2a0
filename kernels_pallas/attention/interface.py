"""The interface of every backend of causal attention."""

from typing import Protocol, TypeGuard, runtime_checkable

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec


def is_automatic(split: PartitionSpec | None) -> TypeGuard[PartitionSpec]:
    """Return whether arrays are yet to be split so; inside `jax.shard_map` a caller has split them already."""
    mesh = jax.sharding.get_abstract_mesh()
    return split is not None and not mesh.empty and AxisType.Manual not in mesh.axis_types


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
        """Return o_BTHK. Operands as in `api.causal_attention`; `split` is for kernels from other libraries."""
        ...
