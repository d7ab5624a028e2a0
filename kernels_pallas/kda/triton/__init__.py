"""The `triton` backend of KDA and Gated DeltaNet-2 (sm80 or later)."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.kda.interface import Kda
from kernels_pallas.linear_attention import triton as linear_attention


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run: as `linear_attention`'s, whose kernels it shares."""
    q, k, v, _, initial = problem.operands
    return linear_attention.refusal(problem._replace(operands=(q, k, v, initial)))


def load() -> Kda:
    """Import the kernels."""
    from kernels_pallas.kda.triton import scan

    return scan


BACKEND = Backend("triton", load, refusal)
