"""The `triton` backend of chunk selection: sm80 to sm90.

It has the rules exact, best_key, best_key_int8, approx and shortlist; with packed documents exact, best_key and approx.
"""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.select_chunk.interface import ChunkSelection
from kernels_pallas.triton import limits

WITH_SEGMENTS = ("exact", "best_key", "approx")
MAX_TOP_K = 16  # lists are in registers, and insertions are unrolled


def load() -> ChunkSelection:
    """Import the kernels."""
    from kernels_pallas.select_chunk.triton import select

    return select


def refusal(problem: Problem) -> str | None:
    """Return why selection refuses a problem, or None.

    Reasons: segments with some rules, the random rule, lists that are too long for registers, or as for all attention
    kernels.
    """
    return (
        without_segments(problem)
        or limits.without(problem, "random")
        or long_list(problem, problem.operands[0].shape[1])
        or limits.attention(problem)
    )


def without_segments(problem: Problem) -> str | None:
    """Return a reason if the call has packed documents and a rule without kernels for them."""
    if not problem.options.get("has_segments") or problem.options["selection"] in WITH_SEGMENTS:
        return None
    return f"with segments it has {', '.join(WITH_SEGMENTS)} only; implementation='xla' has all rules"


def long_list(problem: Problem, length: int) -> str | None:
    """Return a reason if a query lists more chunks than fit in registers.

    `length` is the number of tokens that chunks are selected from.
    """
    name, size = "top_k", problem.options.get("top_k", 1)
    listed = problem.options.get("shortlist")
    if listed is not None and not listed.holds_all(length, problem.options["chunk_size"]):
        name, size = "shortlist", listed.size
    if size <= MAX_TOP_K:
        return None
    return f"it lists at most {MAX_TOP_K} chunks, not {name}={size}; implementation='xla' lists any number"


BACKEND = Backend("triton", load, refusal)
