"""The `triton` backend of the selective scan, for sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.selective_scan.interface import SelectiveScan
from kernels_pallas.triton import limits

MAX_STATES = 64  # per channel: one program holds a tile of channels x states


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run: machine, dtypes or states; else None."""
    reason = limits.machine(problem)
    if reason is not None:
        return reason
    x, dt, a, b, c, *others = problem.operands
    if set(limits.dtype_names(x, b, c)) - set(limits.DTYPES) or limits.dtype_names(dt, a, *others) != ["float32"]:
        names = " and ".join(limits.dtype_names(*problem.operands))
        return f"operands are {names}; x, B, C may be {', '.join(limits.DTYPES)}, the others float32"
    if a.shape[-1] > MAX_STATES:
        return f"{a.shape[-1]} states per channel are more than {MAX_STATES}"
    return None


def load() -> SelectiveScan:
    """Import the kernels."""
    from kernels_pallas.selective_scan.triton import scan

    return scan


BACKEND = Backend("triton", load, refusal)
