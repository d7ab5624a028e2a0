"""Interface of the Top-1 Chunk backends: attention and decoding step."""

from typing import Protocol, runtime_checkable

from jax import Array

from kernels_pallas.select_chunk.tables import Shortlist


@runtime_checkable
class ChunkAttention(Protocol):
    """Attention to a selection, and its gradient.

    Implementations must be hashable, because they are static arguments. sel_BTH has one chunk for every query after the
    first chunk. sel_BTHk has several chunks (which a backend may refuse; the problem's options contain `top_k`), or
    chunks that the caller passes: all different, padded with -1. A selection that the heads of a key-value head share
    has the shape [B, T, G, k]: G instead of H heads.

    `segments_BT` is passed only with packed documents (the problem's options contain `has_segments`). A query reads
    keys of its document only. Selected chunks are candidates as in select_chunk/documents.py, and any query may have
    none.
    """

    def forward(
        self,
        q_BTHK: Array,
        k_BTGK: Array,
        v_BTGV: Array,
        sel_BTH: Array,
        *,
        chunk_size: int,
        scale: float,
        segments_BT: Array | None = None,
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
        segments_BT: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Return (dq, dk, dv), each in the layout and dtype of its primal."""
        ...


@runtime_checkable
class ChunkDecoding(Protocol):
    """Attention of one new token to a cache."""

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
        """Return o_BHV.

        Pass `chunk_mean_BcGK` only with "approx", and `shortlist` and `chunk_table_BcGPK` only with "shortlist".
        """
        ...
