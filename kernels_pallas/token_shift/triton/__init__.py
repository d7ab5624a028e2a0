"""The `triton` backend of the token shift, for sm80 and later."""

import math

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.token_shift.interface import TokenShift
from kernels_pallas.triton import limits

MAX_BRANCHES = 6  # the kernels have a fixed number of result pointers
LEAST_LENGTH = 16  # positions; XLA fuses shorter inputs (one position in decoding) with their neighbours


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run, or None.

    Checks the machine, the dtype, the number of branches and the sequence length.
    """
    x, branches = problem.operands[0], problem.options["branches"]
    reason = limits.machine(problem, entry=math.prod(x.shape[1:]))  # moves have the batch on axis 1
    if reason is not None:
        return reason
    if x.dtype.name not in limits.DTYPES:
        return f"x is {x.dtype.name}; it may be {', '.join(limits.DTYPES)}"
    if branches > MAX_BRANCHES:
        return f"{branches} branches are more than {MAX_BRANCHES}"
    if x.shape[1] < LEAST_LENGTH and not problem.is_named:
        return f"{x.shape[1]} positions are less than {LEAST_LENGTH}"
    return None


def load() -> TokenShift:
    """Import the kernels."""
    from kernels_pallas.token_shift.triton import shift

    return shift


BACKEND = Backend("triton", load, refusal)
