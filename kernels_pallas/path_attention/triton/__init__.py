"""The `triton` backend of PaTH attention, for sm80 and later."""

from typing import Any

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.path_attention.interface import PathAttention
from kernels_pallas.path_walk import triton as walk
from kernels_pallas.triton import limits
from kernels_pallas.triton.blocks import longest_chunk, padded


def chunk(length: int, chunk_size: int, dtype: Any) -> int:
    """Return the tokens per chunk: a power of two from 16 to 64, or 32 where tiles of 64 exceed the registers."""
    return min(longest_chunk(dtype), padded(min(chunk_size, length)))


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run, or None.

    Checks the machine, dtypes, head dim and, as in `path_walk`, the memory of the backward pass.
    """
    refused = limits.attention(problem, entry=limits.with_pairs(*problem.operands))
    if refused is not None:
        return refused
    dim = max(x.shape[-1] for x in problem.operands)
    if dim > walk.MAX_DIM:
        return f"head dim {dim} is larger than {walk.MAX_DIM}"
    (batch, length, heads, width), dtype = problem.operands[0].shape, problem.operands[0].dtype
    size = chunk(length, problem.options["chunk_size"], dtype)
    return walk.too_large(-(-length // size), size, batch * heads * width * dtype.itemsize)


def load() -> PathAttention:
    """Import the kernels."""
    from kernels_pallas.path_attention.triton import attention

    return attention


BACKEND = Backend("triton", load, refusal)
