"""Check what all Triton backends require, without importing Triton."""

import math

import jax
import jax.numpy as jnp

from kernels_pallas.backend import Problem
from kernels_pallas.triton import runtime
from kernels_pallas.triton.blocks import CHUNK

DTYPES = ("bfloat16", "float16", "float32")
MAX_DIM = 128  # larger heads would need smaller tiles than the tile-size tables contain
MAX_ENTRY = 2**31  # elements per batch entry: offsets within an entry are 32-bit (tile_io.py)


def machine(problem: Problem, *, entry: int | None = None) -> str | None:
    """Return why Triton kernels refuse a problem on this machine, or None.

    On a CPU they run only if selected by name. `entry` is how many elements the kernels address with 32-bit offsets.
    With None it is the largest batch entry of any operand; the operands' first axis must then be the batch.
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
    """Return `entry` for kernels that also write [B, T, H, C].

    These arrays have one number per pair of positions in a chunk. The operands are [B, T, H, dim], and C is at most
    `CHUNK`.
    """
    return math.prod(operands[0].shape[1:3]) * max(CHUNK, *(x.shape[-1] for x in operands))


def attention(problem: Problem, *, entry: int | None = None) -> str | None:
    """Return why attention kernels refuse a problem, or None.

    Reasons: the machine, the dtypes, or the head dims (the operands' last axes).
    """
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
    """Return a reason if the problem's selection is in `selections`."""
    selection = problem.options.get("selection")
    return f"it has no {selection} selection; implementation='xla' has" if selection in selections else None


def dtype_names(*operands: jax.ShapeDtypeStruct) -> list[str]:
    """Return the operands' dtype names, sorted and without duplicates."""
    return sorted({jnp.dtype(x.dtype).name for x in operands})
