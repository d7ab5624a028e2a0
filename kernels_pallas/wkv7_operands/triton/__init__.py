"""The `triton` backend of RWKV-7's operands, for sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.triton import limits
from kernels_pallas.triton.blocks import padded
from kernels_pallas.wkv7_operands.interface import Wkv7Operands

MAX_CHANNELS = 1024  # per head, padded to a power of two; a program keeps a whole head in registers
LEAST_LENGTH = 16  # positions; XLA fuses shorter inputs (one position in decoding) with their neighbours


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run, or None.

    Checks the machine, the dtypes, the channels per head and the sequence length.
    """
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
