"""The `triton` backend of log-linear attention, for sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.log_linear.interface import LogLinear
from kernels_pallas.triton import limits

LEAST_CHUNK = 16  # positions, the smallest tile of the matrix units


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run, or None.

    Checks the machine, the dtypes, head dim, state size, chunk size and the number of levels.
    """
    reason = limits.machine(problem)
    if reason is not None:
        return reason
    x, log_a, b, c, m = problem.operands
    if len(names := limits.dtype_names(x, b, c)) > 1 or set(names) - set(limits.DTYPES):
        return f"x, b and c are {' and '.join(names)}; it takes one dtype for all, of {', '.join(limits.DTYPES)}"
    if limits.dtype_names(log_a, m) != ["float32"]:
        return f"decays and level weights are {' and '.join(limits.dtype_names(log_a, m))}; it takes float32"
    if max(x.shape[-1], b.shape[-1]) > limits.MAX_DIM:
        return f"head dim {x.shape[-1]} or state {b.shape[-1]} is larger than {limits.MAX_DIM}"
    if m.shape[-1] < 2:
        return "one level is plain SSD; it needs at least two levels"
    if problem.options["chunk_size"] < LEAST_CHUNK and not problem.is_named:
        return f"{problem.options['chunk_size']} positions per chunk are less than a tile of {LEAST_CHUNK}"
    return None


def load() -> LogLinear:
    """Import the kernels."""
    from kernels_pallas.log_linear.triton import scan

    return scan


BACKEND = Backend("triton", load, refusal)
