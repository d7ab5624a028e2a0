"""The `triton` backend of chunk selection: exact and approx, sm80 and later."""

from kernels_pallas.backend import Backend
from kernels_pallas.select_chunk.interface import ChunkSelection
from kernels_pallas.triton import limits


def load() -> ChunkSelection:
    """Import the kernels."""
    from kernels_pallas.select_chunk.triton import select

    return select


BACKEND = Backend("triton", load, limits.attention)
