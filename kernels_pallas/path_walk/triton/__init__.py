"""The `triton` backend of PaTH's walk, for sm80 and later."""

import math

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.path_walk.interface import PathWalk
from kernels_pallas.triton import limits

MAX_DIM = 64  # per head: at 128 the tiles exceed the shared memory of an H100
LEAST = 16  # tokens per chunk: the minimum of `tl.dot`
MOST_GIB = 16.0


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run, or None.

    Checks the machine, dtypes, head dim, chunk size and memory of the backward pass.
    """
    refused = limits.attention(problem, entry=0)  # offsets stay within a chunk; the checks below bound it
    if refused is not None:
        return refused
    dim = max(x.shape[-1] for x in problem.operands)
    if dim > MAX_DIM:
        return f"head dim {dim} is larger than {MAX_DIM}"
    k = problem.operands[0]
    chunk = k.shape[-2]
    if chunk < LEAST or chunk & (chunk - 1):
        return f"chunks of {chunk} tokens are no power of two from {LEAST} on"
    return too_large(problem.options["chunks"], chunk, math.prod(k.shape[1:3]) * k.shape[-1] * k.dtype.itemsize)


def too_large(chunks: int, chunk: int, row: int) -> str | None:
    """Return why the backward pass of `chunks` chunks takes too much memory, or None.

    It keeps queries and their gradients for each pair of chunks; `row` is their bytes per token position.
    """
    gib = 2 * (chunks * (chunks - 1) // 2) * chunk * row / 2**30
    if gib > MOST_GIB:
        return (
            f"its backward pass would take {gib:.0f} GiB at {chunks} chunks of {chunk} tokens, more than {MOST_GIB:.0f}"
        )
    return None


def load() -> PathWalk:
    """Import the kernels."""
    from kernels_pallas.path_walk.triton import walk

    return walk


BACKEND = Backend("triton", load, refusal)
