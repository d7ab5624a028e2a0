"""The `triton` backend of the delta rule, for sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.delta_rule.interface import DeltaRule
from kernels_pallas.triton import limits

MAX_VALUE_DIM = 2 * limits.MAX_DIM  # value dims are tiled; Gated DeltaNet has 192 at 110m


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run: machine, dtypes or head dims; else None.

    k and v have the dtype of q.
    """
    q, _, v, *wide = problem.operands
    reason = limits.machine(problem, entry=limits.with_pairs(q, v))
    if reason is not None:
        return reason
    if set(limits.dtype_names(q)) - set(limits.DTYPES) or limits.dtype_names(*wide) != ["float32"]:
        names = " and ".join(limits.dtype_names(q, *wide))
        return f"operands are {names}; q may be {', '.join(limits.DTYPES)}, beta, decays and states float32"
    if q.shape[-1] > limits.MAX_DIM:
        return f"key dim {q.shape[-1]} is larger than {limits.MAX_DIM}"
    if v.shape[-1] > MAX_VALUE_DIM:
        return f"value dim {v.shape[-1]} is larger than {MAX_VALUE_DIM}"
    return None


def load() -> DeltaRule:
    """Import the kernels."""
    from kernels_pallas.delta_rule.triton import scan

    return scan


BACKEND = Backend("triton", load, refusal)
