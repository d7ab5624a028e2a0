"""The `triton` backend of the operands of RWKV-7's recurrence: sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.triton import limits
from kernels_pallas.triton.blocks import padded
from kernels_pallas.wkv7_operands.interface import Wkv7Operands

MAX_CHANNELS = 1024  # of a head, padded to a power of two: a program has a whole head in registers
LEAST_LENGTH = 16  # positions; below that (a decoding step has one) XLA joins it with what is around it


def refusal(problem: Problem) -> str | None:
    """Say why it refuses: the machine, the dtypes, the channels of a head, or a short sequence."""
    reason = limits.machine(problem)
    if reason is not None:
        return reason
    names, (_, T, _, K) = limits.dtype_names(*problem.operands), problem.operands[0].shape
    if len(names) > 1 or names[0] not in limits.DTYPES:
        return f"operands are {' and '.join(names)}; it takes one dtype for all, of {', '.join(limits.DTYPES)}"
    if padded(K) > MAX_CHANNELS:
        return f"a head of {K} channels is wider than {MAX_CHANNELS}"
    if T < LEAST_LENGTH and not problem.is_named:
        return f"{T} positions are less than {LEAST_LENGTH}"
    return None


def load() -> Wkv7Operands:
    """Import the kernels."""
    from kernels_pallas.wkv7_operands.triton import operands

    return operands


BACKEND = Backend("triton", load, refusal)
