"""The `triton` backend of the token shift: sm80 and later."""

import math

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.token_shift.interface import TokenShift
from kernels_pallas.triton import limits

MAX_BRANCHES = 6  # results of a kernel, which a launch cannot count
LEAST_LENGTH = 16  # positions; below that (a decoding step has one) XLA joins it with what is around it


def refusal(problem: Problem) -> str | None:
    """Say why it refuses: the machine, the dtype, the number of branches, or a short sequence."""
    x, branches = problem.operands[0], problem.options["branches"]
    reason = limits.machine(problem, entry=math.prod(x.shape[1:]))  # the batch is the second axis of the moves
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
