"""The requirements of every Triton backend, checked before it is loaded and without importing Triton."""

import math

import jax
import jax.numpy as jnp

from kernels_pallas.backend import Problem
from kernels_pallas.triton import runtime
from kernels_pallas.triton.blocks import CHUNK

DTYPES = ("bfloat16", "float16", "float32")
MAX_DIM = 128  # larger heads need smaller tiles than any that the tables of tile sizes hold
MAX_ENTRY = 2**31  # elements of a batch entry: offsets within it are 32-bit (tile_io.py)


def machine(problem: Problem, *, entry: int | None = None) -> str | None:
    """Return why Triton kernels do not run here, or only if selected by name.

    `entry` is the number of elements over which the kernels' offsets are 32-bit. None is the largest batch entry of an
    operand, for operands whose first axis is the batch.
    """
    refusal = runtime.refusal(problem.platform)
    if refusal is not None:
        return refusal
    if problem.platform == "cpu" and not problem.is_named:
        return "on a CPU Triton's interpreter is for tests: it runs only when selected by name"
    entry = max(math.prod(x.shape[1:]) for x in problem.operands) if entry is None else entry
    if entry > MAX_ENTRY:
        return f"a batch entry has {entry:,} elements, and 32-bit offsets reach {MAX_ENTRY:,}"
    return None


def with_pairs(*operands: jax.ShapeDtypeStruct) -> int:
    """Return `entry` for kernels that also write [B, T, H, C], the pairs of positions within chunks of C.

    The operands are [B, T, H, dim], and C is at most `CHUNK`.
    """
    return math.prod(operands[0].shape[1:3]) * max(CHUNK, *(x.shape[-1] for x in operands))


def attention(problem: Problem, *, entry: int | None = None) -> str | None:
    """Say why the attentions refuse: as `machine` does, the dtypes, or the head dims (the operands' last axes)."""
    refusal = machine(problem, entry=entry)
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
