"""Interface of the backends of the index loss."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class IndexLoss(Protocol):
    """The loss, and its gradients from the same pass.

    Implementations must be hashable, because they are static arguments.
    """

    def run(
        self,
        index_q_BTGN: Array,
        index_k_BTN: Array,
        q_BTHK: Array,
        k_BTGK: Array,
        sel_BTGn: Array,
        *,
        block_size: int,
        with_gradients: bool,
    ) -> tuple[Array, ...]:
        """Return (loss,), or with gradients (loss, d_index_q_BTGN, d_index_k_BTN).

        The loss is a scalar in the accumulation dtype. Each gradient has its primal's dtype.
        """
        ...
