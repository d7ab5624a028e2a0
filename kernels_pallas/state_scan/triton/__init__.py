"""The `triton` backend of the chunk-start states, for sm80 and later."""

import math

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.state_scan.interface import StateScan
from kernels_pallas.triton import limits


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run: machine, dtypes or key dim; else None."""
    reason = limits.machine(problem, entry=math.prod(problem.operands[-1].shape[1:]))  # offsets are within a chunk
    if reason is not None:
        return reason
    if (names := limits.dtype_names(*problem.operands)) != ["float32"]:
        return f"operands are {' and '.join(names)}; it takes float32"
    if problem.options["key_dim"] > limits.MAX_DIM:
        return f"key dim {problem.options['key_dim']} is larger than {limits.MAX_DIM}"
    return None


def load() -> StateScan:
    """Import the kernels."""
    from kernels_pallas.state_scan.triton import scan

    return scan


BACKEND = Backend("triton", load, refusal)
