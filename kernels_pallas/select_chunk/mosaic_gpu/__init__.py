"""The `pallas` backend of chunk selection: exact, in Pallas Mosaic GPU, on Hopper."""

import jax.numpy as jnp

from kernels_pallas import mosaic_gpu
from kernels_pallas.backend import Backend, Problem
from kernels_pallas.select_chunk.interface import ChunkSelection

DTYPES = ("bfloat16", "float16")
DIMS = (64, 128)  # one row of keys fills one or two swizzled tiles of shared memory
ROWS = 64  # of queries in one matrix instruction; they must share their past

# Tokens per sequence from which this is faster than Triton, on an H200: 19.3 against 20.7 ms at 102,400, 0.126 against
# 0.111 at 2,048 (docs/kernels.md).
LEADS_FROM = 16_384


def refusal(problem: Problem) -> str | None:
    """Say why the kernel refuses: the machine, the selection, the dtypes, the head dim, or the chunk."""
    if problem.options.get("selection") != "exact":
        return "it has the exact selection only"
    if (top_k := problem.options.get("top_k", 1)) > 1:
        return f"it selects one chunk per query, not top_k={top_k}; implementation='xla' selects several"
    dtypes = sorted({jnp.dtype(x.dtype).name for x in problem.operands})
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        return f"operands are {' and '.join(dtypes)}; it takes one dtype for all, of {', '.join(DTYPES)}"
    dim = problem.operands[0].shape[-1]
    if dim not in DIMS:
        return f"head dim {dim} is none of {', '.join(map(str, DIMS))}"
    if (chunk_size := problem.options["chunk_size"]) % ROWS:
        return f"chunks of {chunk_size} are not a multiple of {ROWS}"
    reason = mosaic_gpu.refusal(problem.platform)
    if reason is None and problem.platform == "cpu" and not problem.is_named:
        return "on a CPU Pallas' interpreter is for tests: it runs only when selected by name"
    return reason


def leads(problem: Problem) -> bool:
    """Whether it is tried before Triton."""
    return problem.operands[0].shape[1] >= LEADS_FROM


def load() -> ChunkSelection:
    """Import the kernel."""
    from kernels_pallas.select_chunk.mosaic_gpu import select

    return select


BACKEND = Backend("pallas", load, refusal, leads)
