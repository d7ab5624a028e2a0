"""The `triton` backend of the walk: sm80 and later."""

import math

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.path_walk.interface import PathWalk
from kernels_pallas.triton import limits

MAX_DIM = 64  # of a head: at 128 the tiles do not fit into the shared memory of an H100
LEAST = 16  # tokens of a chunk: what `tl.dot` takes
MOST_GIB = 16.0


def refusal(problem: Problem) -> str | None:
    """Say why Triton refuses: the machine, dtypes, the head dim, the chunks, or the memory of the backward pass."""
    refused = limits.attention(problem, entry=0)  # of one chunk, which its limits bound
    if refused is not None:
        return refused
    dim = max(x.shape[-1] for x in problem.operands)
    if dim > MAX_DIM:
        return f"head dim {dim} is larger than {MAX_DIM}"
    k = problem.operands[0]
    chunk = k.shape[-2]
    if chunk < LEAST or chunk & (chunk - 1):
        return f"chunks of {chunk} tokens are no power of two from {LEAST} on"
    chunks = problem.options["chunks"]
    # queries, and their gradients, of each pair of chunks
    gib = 2 * (chunks * (chunks - 1) // 2) * math.prod(k.shape[1:]) * k.dtype.itemsize / 2**30
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
