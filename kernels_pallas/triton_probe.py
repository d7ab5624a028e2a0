"""What every Triton backend demands before it is loaded, and choices they share; imports nothing of Triton itself."""

import jax.numpy as jnp

from kernels_pallas import compat
from kernels_pallas.dispatch import Problem

DTYPES = ("bfloat16", "float16", "float32")
MAX_CHUNK = 256  # a decoding step holds one chunk of keys in shared memory
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


def padded(dim: int) -> int:
    """The power of two, at least 16, that a dim is padded to inside a kernel: what `tl.dot` takes."""
    return max(16, 1 << (dim - 1).bit_length())


def precision(dtype: jnp.dtype) -> str:
    """`input_precision` of `tl.dot`: fp32 as three TF32 products, on matrix units and nearly exact; else no choice."""
    return "tf32x3" if jnp.dtype(dtype) == jnp.float32 else "tf32"


def splits(programs: int, units: int, *, least: int) -> int:
    """Into how many shares a decoding step cuts `units` of work that `programs` (batch x heads) each have.

    About 8,192 programs, many more than any GPU runs at a time, so that the last ones to finish are few; at most 64
    shares, and at least `least` units each (two in the interpreter, where contexts are short).
    """
    return max(1, min(8192 // programs, 64, units // (2 if compat.is_interpreted() else least)))


def chunk_decode(problem: Problem) -> str | None:
    """`probe`, and the chunk must fit the tile of one step."""
    if problem.options["chunk_size"] > MAX_CHUNK:
        return f"chunk_size {problem.options['chunk_size']} is larger than {MAX_CHUNK}"
    return probe(problem)
