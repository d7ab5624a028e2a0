"""The `triton` backend of chunk selection: exact, best_key, best_key_int8, approx and shortlist; sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.select_chunk.interface import ChunkSelection
from kernels_pallas.triton import limits

MAX_TOP_K = 16  # lists in registers, whose insertions are unrolled


def load() -> ChunkSelection:
    """Import the kernels."""
    from kernels_pallas.select_chunk.triton import select

    return select


def refusal(problem: Problem) -> str | None:
    """Say why selection refuses: the random rule, longer lists than registers hold, or as all attentions do."""
    return (
        limits.without(problem, "random")
        or long_list(problem, problem.operands[0].shape[1])
        or limits.attention(problem)
    )


def long_list(problem: Problem, length: int) -> str | None:
    """Say that a query lists more chunks, among those of so many tokens, than registers hold."""
    name, size = "top_k", problem.options.get("top_k", 1)
    listed = problem.options.get("shortlist")
    if listed is not None and not listed.holds_all(length, problem.options["chunk_size"]):
        name, size = "shortlist", listed.size
    if size <= MAX_TOP_K:
        return None
    return f"it lists at most {MAX_TOP_K} chunks, not {name}={size}; implementation='xla' lists any number"


BACKEND = Backend("triton", load, refusal)
