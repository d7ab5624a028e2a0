"""The interface of every backend of Top-1 Chunk attention and its decoding step."""

from typing import Protocol, runtime_checkable

from jax import Array

from kernels_pallas.select_chunk.tables import Shortlist


@runtime_checkable
class ChunkAttention(Protocol):
    """Attention given the selection, and its gradient. Hashable: it is a static argument.

    sel_BTH has a chunk for every query after the first chunk. Several, which a backend may refuse (`top_k` among the
    options of a problem), and one or none that the caller names are sel_BTHk: different chunks, -1 after the last.
    """

    def forward(
        self, q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, sel_BTH: Array, *, chunk_size: int, scale: float
    ) -> tuple[Array, Array]:
        """Return (o_BTHV in v's dtype, lse_BTH in the accumulation dtype)."""
        ...

    def backward(
        self,
        q_BTHK: Array,
        k_BTGK: Array,
        v_BTGV: Array,
        o_BTHV: Array,
        lse_BTH: Array,
        sel_BTH: Array,
        do_BTHV: Array,
        *,
        chunk_size: int,
        scale: float,
    ) -> tuple[Array, Array, Array]:
        """Return (dq, dk, dv), each in the layout and dtype of its primal."""
        ...


@runtime_checkable
class ChunkDecoding(Protocol):
    """Attention of a new token to a cache."""

    def decode(
        self,
        q_BHK: Array,
        k_BSGK: Array,
        v_BSGV: Array,
        length: Array,
        *,
        chunk_size: int,
        selection: str,
        top_k: int,
        scale: float,
        chunk_mean_BcGK: Array | None,
        shortlist: Shortlist | None = None,
        chunk_table_BcGPK: Array | None = None,
    ) -> Array:
        """Return o_BHV; there are means for "approx" alone; a shortlist and its table come with "shortlist" alone."""
        ...
