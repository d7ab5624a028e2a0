"""The `triton` backend of causal attention with forget gates: sm80 and later."""

from kernels_pallas.attention.interface import CausalAttention
from kernels_pallas.backend import Backend, Problem
from kernels_pallas.triton import limits


def refusal(problem: Problem) -> str | None:
    """Say why Triton refuses: what another backend has kernels for, the machine, dtypes, or the head dim."""
    if not problem.options["has_gates"]:
        return "its kernels are those of forget gates; without them cuDNN's are faster"
    if problem.options["window"] or problem.options["slopes"]:
        return "beside forget gates it takes no window and no ALiBi; implementation='chunked' does"
    return limits.attention(problem)


def load() -> CausalAttention:
    """Import the kernels."""
    from kernels_pallas.attention.triton import gated

    return gated


BACKEND = Backend("triton", load, refusal)
