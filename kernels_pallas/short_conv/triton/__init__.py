"""The `triton` backend of the short convolution, for sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.short_conv.interface import ShortConv
from kernels_pallas.triton import limits

MAX_WIDTH = 8  # taps; their rows stay in registers
MAX_HEAD = 256  # channels per normalised head: one program handles a head
LEAST_LENGTH = 16  # positions; XLA fuses shorter inputs (one position in decoding) with their neighbours


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run, or None.

    Checks the machine, dtypes, number of taps, channels per head and sequence length.
    """
    reason = limits.machine(problem)
    if reason is not None:
        return reason
    x, w, *others = problem.operands
    if set(limits.dtype_names(x)) - set(limits.DTYPES) or limits.dtype_names(w) != ["float32"]:
        names = " and ".join(limits.dtype_names(x, w, *others))
        return f"operands are {names}; x may be {', '.join(limits.DTYPES)}, taps and bias float32"
    if w.shape[1] > MAX_WIDTH:
        return f"{w.shape[1]} taps are more than {MAX_WIDTH}"
    heads = problem.options["l2_heads"]
    if heads is not None and x.shape[-1] // heads > MAX_HEAD:
        return f"normalised heads of {x.shape[-1] // heads} channels are larger than {MAX_HEAD}"
    if x.shape[1] < LEAST_LENGTH and not problem.is_named:
        return f"{x.shape[1]} positions are less than {LEAST_LENGTH}"
    return None


def load() -> ShortConv:
    """Import the kernels."""
    from kernels_pallas.short_conv.triton import conv

    return conv


BACKEND = Backend("triton", load, refusal)
