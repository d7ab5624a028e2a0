"""The `triton` backend of chunk selection: exact, best_key, best_key_int8, and approx of several; sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.select_chunk.interface import ChunkSelection
from kernels_pallas.triton import limits

MAX_TOP_K = 16  # lists in registers, whose insertions are unrolled


def load() -> ChunkSelection:
    """Import the kernels."""
    from kernels_pallas.select_chunk.triton import select

    return select


def refusal(problem: Problem) -> str | None:
    """Say why selection refuses: the rule, several chunks by another rule than approx, or as all attentions do."""
    selection, top_k = problem.options.get("selection"), problem.options.get("top_k", 1)
    if selection != "approx":
        return limits.selection_without_kernel(problem) or limits.one_chunk(problem)
    if top_k > MAX_TOP_K:
        return f"approx selects at most {MAX_TOP_K} chunks, not top_k={top_k}; implementation='xla' selects any number"
    return limits.attention(problem)


BACKEND = Backend("triton", load, refusal)
