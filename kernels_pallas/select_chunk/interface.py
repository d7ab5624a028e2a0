"""The interface of every backend of chunk selection."""

from typing import Protocol, runtime_checkable

from jax import Array

from kernels_pallas.select_chunk.tables import Shortlist


@runtime_checkable
class ChunkSelection(Protocol):
    """The kernels of one backend."""

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
    ) -> Array:
        """Return sel_BTH int32: the full past chunk that each query selects, -1 in the first chunk.

        With a top_k above 1, which a backend may refuse, sel_BTHk: the best first, -1 after the last past chunk. A
        `shortlist` comes with selection="shortlist" alone.
        """
        ...
