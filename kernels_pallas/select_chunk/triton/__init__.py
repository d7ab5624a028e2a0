"""The `triton` backend of chunk selection: exact, best_key, best_key_int8 and approx, sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.select_chunk.interface import ChunkSelection
from kernels_pallas.triton import limits


def load() -> ChunkSelection:
    """Import the kernels."""
    from kernels_pallas.select_chunk.triton import select

    return select


def refusal(problem: Problem) -> str | None:
    """Say why selection refuses: the rule, or as Top-1 Chunk attention does."""
    return limits.selection_without_kernel(problem) or limits.one_chunk(problem)


BACKEND = Backend("triton", load, refusal)
