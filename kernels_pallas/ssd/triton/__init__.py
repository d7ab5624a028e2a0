"""The `triton` backend of SSD (Mamba-2), for sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.ssd.interface import Ssd
from kernels_pallas.triton import limits

LEAST_CHUNK = 16  # positions; smaller chunks (one position in decoding) leave the matrix units mostly padding


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run, or None.

    Checks the machine, the dtypes (B and C have the dtype of x), head dim, state size and chunk size.
    """
    reason = limits.machine(problem)
    if reason is not None:
        return reason
    x, log_a, b, _, *others = problem.operands
    if set(limits.dtype_names(x)) - set(limits.DTYPES) or limits.dtype_names(log_a, *others) != ["float32"]:
        names = " and ".join(limits.dtype_names(x, log_a, *others))
        return f"operands are {names}; x may be {', '.join(limits.DTYPES)}, decays and states float32"
    if max(x.shape[-1], b.shape[-1]) > limits.MAX_DIM:
        return f"head dim {x.shape[-1]} or state {b.shape[-1]} is larger than {limits.MAX_DIM}"
    if problem.options["chunk_size"] < LEAST_CHUNK and not problem.is_named:
        return f"{problem.options['chunk_size']} positions per chunk are less than a tile of {LEAST_CHUNK}"
    return None


def load() -> Ssd:
    """Import the kernels."""
    from kernels_pallas.ssd.triton import scan

    return scan


BACKEND = Backend("triton", load, refusal)
