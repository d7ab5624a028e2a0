"""The requirements of every Triton backend, checked before it is loaded and without importing Triton."""

import jax
import jax.numpy as jnp

from kernels_pallas.backend import Problem
from kernels_pallas.triton import runtime

DTYPES = ("bfloat16", "float16", "float32")
MAX_DIM = 128  # larger heads need smaller tiles than any that the tables of tile sizes hold


def machine(problem: Problem) -> str | None:
    """Return why Triton kernels do not run here, or only if selected by name."""
    refusal = runtime.refusal(problem.platform)
    if refusal is not None:
        return refusal
    if problem.platform == "cpu" and not problem.is_named:
        return "on a CPU Triton's interpreter is for tests: it runs only when selected by name"
    return None


def attention(problem: Problem) -> str | None:
    """Say why the attentions refuse: the machine, the dtypes, or the head dims (the operands' last axes)."""
    refusal = machine(problem)
    if refusal is not None:
        return refusal
    dtypes = dtype_names(*problem.operands)
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        return f"operands are {' and '.join(dtypes)}; it takes one dtype for all, of {', '.join(DTYPES)}"
    dim = max(x.shape[-1] for x in problem.operands)
    if dim > MAX_DIM:
        return f"head dim {dim} is larger than {MAX_DIM}"
    return None


def without(problem: Problem, *selections: str) -> str | None:
    """Say that the selection is one of these, which kernels do not have."""
    selection = problem.options.get("selection")
    return f"it has no {selection} selection; implementation='xla' has" if selection in selections else None


def dtype_names(*operands: jax.ShapeDtypeStruct) -> list[str]:
    """Return the names of the operands' dtypes, each once, in order."""
    return sorted({jnp.dtype(x.dtype).name for x in operands})
