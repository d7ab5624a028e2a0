"""What every Triton backend demands before it is loaded; imports nothing of Triton itself."""

import jax.numpy as jnp

from kernels_pallas import compat
from kernels_pallas.dispatch import Problem

DTYPES = ("bfloat16", "float16", "float32")
MAX_DIM = 128  # larger heads need smaller tiles than any that the tables of tile sizes hold


def probe(problem: Problem) -> str | None:
    """None, or why Triton refuses: the machine, the dtypes, or the head dims (the operands' last axes)."""
    refusal = compat.triton_refusal(problem.platform)
    if refusal is not None:
        return refusal
    if problem.platform == "cpu" and not problem.is_named:
        return "on a CPU Triton's interpreter is for tests: it runs only when it is asked for by name"
    dtypes = sorted({jnp.dtype(x.dtype).name for x in problem.operands})
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        return f"operands are {' and '.join(dtypes)}; it takes one dtype for all, of {', '.join(DTYPES)}"
    dim = max(x.shape[-1] for x in problem.operands)
    if dim > MAX_DIM:
        return f"head dim {dim} is larger than {MAX_DIM}"
    return None
