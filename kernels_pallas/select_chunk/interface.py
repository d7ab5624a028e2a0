"""Interface of the chunk-selection backends."""

from typing import Protocol, runtime_checkable

from jax import Array

from kernels_pallas.select_chunk.tables import Shortlist


@runtime_checkable
class ChunkSelection(Protocol):
    """The kernels of a backend."""

    def select(
        self,
        q_BTHK: Array,
        k_BTGK: Array,
        *,
        chunk_size: int,
        selection: str,
        top_k: int = 1,
        shortlist: Shortlist | None = None,
        scale: float,
        segments_BT: Array | None = None,
    ) -> Array:
        """Return sel_BTH int32, the full past chunk that each query selects.

        The selection is -1 in the first chunk. `segments_BT` is passed only if the call has segments; the problem's
        option `has_segments` says so. With top_k above 1 (a backend may refuse it), return sel_BTHk: best
        chunk first, padded with -1. `shortlist` is set only with selection="shortlist".
        """
        ...
