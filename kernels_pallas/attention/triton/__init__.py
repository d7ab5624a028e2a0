"""The `triton` backend of causal attention with forget gates or packed documents: sm80 to sm90."""

from kernels_pallas.attention.interface import CausalAttention
from kernels_pallas.backend import Backend, Problem
from kernels_pallas.triton import limits


def refusal(problem: Problem) -> str | None:
    """Return why Triton refuses a problem, or None.

    Reasons: the call has neither gates nor segments, or gates with a window or ALiBi but no segments; the machine, the
    dtypes, or the head dim.
    """
    if problem.options.get("has_segments"):  # kernels for any mask of this op
        return limits.attention(problem)
    if not problem.options["has_gates"]:
        return "its kernels need forget gates or segments; without them cuDNN's are faster"
    if problem.options["window"] or problem.options["slopes"]:
        return "with forget gates it takes no window and no ALiBi; implementation='chunked' does"
    return limits.attention(problem)


def load() -> CausalAttention:
    """Import the kernels."""
    from kernels_pallas.attention.triton import gated

    return gated


BACKEND = Backend("triton", load, refusal)
