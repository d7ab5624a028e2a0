"""The `triton` backend of Mamba-3's operands, for sm80 and later."""

import math

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.mamba3_operands.interface import Mamba3Operands
from kernels_pallas.triton import limits

MAX_CHANNELS = 256  # of B and C; a program keeps the sums of their gradients in registers
LEAST_LENGTH = 16  # positions; XLA fuses shorter inputs (one position in decoding) with their neighbours


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run, or None.

    Checks the machine, the dtypes, the channels and the sequence length.
    """
    b, c, *wide = problem.operands
    (_, T, N), H = b.shape, wide[-1].shape[-1]
    reason = limits.machine(problem, entry=math.prod((T, H, N)))
    if reason is not None:
        return reason
    names = limits.dtype_names(b, c)
    if len(names) > 1 or names[0] not in limits.DTYPES:
        return f"operands are {' and '.join(names)}; it takes one dtype for both, of {', '.join(limits.DTYPES)}"
    if N > MAX_CHANNELS:
        return f"{N} channels are more than {MAX_CHANNELS}"
    if T < LEAST_LENGTH and not problem.is_named:
        return f"{T} positions are less than {LEAST_LENGTH}"
    return None


def load() -> Mamba3Operands:
    """Import the kernels."""
    from kernels_pallas.mamba3_operands.triton import operands

    return operands


BACKEND = Backend("triton", load, refusal)
