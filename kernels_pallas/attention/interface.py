"""Interface of the causal-attention backends."""

from typing import Protocol, TypeGuard, runtime_checkable

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec


def is_automatic(split: PartitionSpec | None) -> TypeGuard[PartitionSpec]:
    """Return whether a kernel must still shard its arrays by `split`.

    Inside `jax.shard_map` the caller has already split them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return split is not None and not mesh.empty and AxisType.Manual not in mesh.axis_types


@runtime_checkable
class CausalAttention(Protocol):
    """Softmax attention over the past; differentiable."""

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
        segments_BT: Array | None = None,
    ) -> Array:
        """Return o_BTHK; operands as in `api.causal_attention`.

        `split` is for kernels from other libraries. `segments_BT` is passed only if the call has segments; the
        problem's option `has_segments` says so.
        """
        ...
