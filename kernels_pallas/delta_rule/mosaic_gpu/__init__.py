"""The `pallas` backend of the delta rule: Hopper.

The passes over time, forward and back, and the input gradients are Pallas Mosaic GPU kernels (kernel.py, reverse.py,
gradients.py). The inverses and the scores are Triton kernels.
"""

import jax

from kernels_pallas import mosaic_gpu
from kernels_pallas.backend import Backend, Problem
from kernels_pallas.delta_rule import triton
from kernels_pallas.delta_rule.interface import DeltaRule
from kernels_pallas.triton import limits

DTYPES = ("bfloat16", "float16")
KEY_DIMS = (64, 96, 128)
JAX = (0, 11)
CHUNK = 64  # value channels of a warpgroup, and positions of a chunk
MEASURED = ((96, 192), (128, 128))  # key and value dims
PROGRAMS = 96  # sequences x heads; with fewer, triton divides time into segments


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run: machine, dtypes, head dims, or chunk; else None."""
    q, _, v, *_ = problem.operands
    if limits.dtype_names(q)[0] not in DTYPES:
        return f"q is {limits.dtype_names(q)[0]}; it takes {' and '.join(DTYPES)}"
    if q.shape[-1] not in KEY_DIMS:
        return f"key dim {q.shape[-1]} is none of {', '.join(map(str, KEY_DIMS))}"
    if v.shape[-1] % CHUNK:
        return f"value dim {v.shape[-1]} is not a multiple of {CHUNK}"
    if min(problem.options["chunk_size"], q.shape[1]) <= CHUNK // 2:
        return f"chunks are shorter than {CHUNK}"
    if problem.platform == "cpu":
        return "it runs on a GPU only"
    if jax.__version_info__ < JAX:
        return f"jax is {jax.__version__}; it needs {'.'.join(map(str, JAX))}, which loads transposed tiles"
    return mosaic_gpu.refusal(problem.platform) or triton.refusal(problem)


def leads(problem: Problem) -> bool:
    """Return whether the problem is one for which it was measured, and was faster than triton."""
    q, _, v, *_ = problem.operands
    (B, T, H, K), V = q.shape, v.shape[-1]
    is_measured = (K, V) in MEASURED and q.dtype == "bfloat16" and T % CHUNK == 0
    return is_measured and B * H >= PROGRAMS


def load() -> DeltaRule:
    """Import the kernels."""
    from kernels_pallas.delta_rule.mosaic_gpu import scan

    return scan


BACKEND = Backend("pallas", load, refusal, leads=leads)
