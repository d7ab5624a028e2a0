"""What the Pallas Mosaic GPU backend of chunk selection demands before it is loaded; imports no kernel itself."""

import jax.numpy as jnp

from kernels_pallas import compat
from kernels_pallas.dispatch import Problem

DTYPES = ("bfloat16", "float16")
DIMS = (64, 128)  # one row of keys fills one or two swizzled tiles of shared memory
ROWS = 64  # of queries in one matrix instruction; they must share their past


def probe(problem: Problem) -> str | None:
    """None, or why the kernel refuses: the machine, the selection, the dtypes, the head dim, or the chunk."""
    if problem.options.get("selection") != "exact":
        return "it has the exact selection only"
    dtypes = sorted({jnp.dtype(x.dtype).name for x in problem.operands})
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        return f"operands are {' and '.join(dtypes)}; it takes one dtype for all, of {', '.join(DTYPES)}"
    dim = problem.operands[0].shape[-1]
    if dim not in DIMS:
        return f"head dim {dim} is none of {', '.join(map(str, DIMS))}"
    if (chunk_size := problem.options["chunk_size"]) % ROWS:
        return f"chunks of {chunk_size} are not a multiple of {ROWS}"
    refusal = compat.mosaic_refusal(problem.platform)
    if refusal is None and problem.platform == "cpu" and not problem.is_named:
        return "on a CPU Pallas' interpreter is for tests: it runs only when it is asked for by name"
    return refusal
