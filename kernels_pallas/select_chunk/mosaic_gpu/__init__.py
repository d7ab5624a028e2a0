"""The `pallas` backend of chunk selection: Pallas Mosaic GPU, Hopper.

It has the rules exact and best_key.
"""

import math

import jax.numpy as jnp

from kernels_pallas import mosaic_gpu
from kernels_pallas.backend import Backend, Problem
from kernels_pallas.select_chunk.interface import ChunkSelection

DTYPES = ("bfloat16", "float16")
DIMS = (64, 128)  # a key fills one or two swizzled tiles of shared memory
SELECTIONS = ("exact", "best_key")
ROWS = 64  # queries per matrix instruction; they must have the same past chunks

# Tokens per sequence from which a rule is tried here before Triton. On an H200 exact takes 19.3 ms (Triton 20.7 ms) at
# 102,400 tokens, and 0.126 ms (Triton 0.111 ms) at 2,048; best_key 11.6 ms (Triton 13.3 ms) and 0.119 ms (Triton 0.129
# ms). Shorter sequences were not timed.
LEADS_FROM = {"exact": 16_384, "best_key": 2_048}


def refusal(problem: Problem) -> str | None:
    """Return why the kernel refuses: segments, machine, selection, dtypes, head dim, or chunk."""
    if problem.options.get("has_segments"):
        return "it has no segments; implementation='xla' has"
    if (selection := problem.options.get("selection")) not in SELECTIONS:
        return f"it selects by {' or '.join(SELECTIONS)}, not {selection}"
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
    """Return whether this backend is tried before Triton."""
    return problem.operands[0].shape[1] >= LEADS_FROM.get(problem.options["selection"], math.inf)


def load() -> ChunkSelection:
    """Import the kernel."""
    from kernels_pallas.select_chunk.mosaic_gpu import select

    return select


BACKEND = Backend("pallas", load, refusal, leads)
