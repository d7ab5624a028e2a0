"""The `triton` backend of linear attention with key-channel decay (sm80 or later)."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.linear_attention.interface import LinearAttention
from kernels_pallas.triton import limits

DTYPES = ("bfloat16", "float32")  # no float16: it cannot hold weights up to e^60
MAX_VALUE_DIM = 2 * limits.MAX_DIM  # value dims are tiled; GLA has 192 at 110m


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run: machine, dtypes or head dims; else None.

    r and k have the dtype of v.
    """
    r, _, v, *wide = problem.operands
    reason = limits.machine(problem, entry=limits.with_pairs(r, v))
    if reason is not None:
        return reason
    if set(limits.dtype_names(v)) - set(DTYPES) or limits.dtype_names(*wide) != ["float32"]:
        names = " and ".join(limits.dtype_names(v, *wide))
        return f"operands are {names}; v may be {', '.join(DTYPES)}, decays, u and states float32"
    if r.shape[-1] > limits.MAX_DIM:
        return f"key dim {r.shape[-1]} is larger than {limits.MAX_DIM}"
    if v.shape[-1] > MAX_VALUE_DIM:
        return f"value dim {v.shape[-1]} is larger than {MAX_VALUE_DIM}"
    return None


def load() -> LinearAttention:
    """Import the kernels."""
    from kernels_pallas.linear_attention.triton import scan

    return scan


BACKEND = Backend("triton", load, refusal)
