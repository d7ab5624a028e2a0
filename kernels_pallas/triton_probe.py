"""What every Triton backend demands before it is loaded, and choices they share; imports nothing of Triton itself."""

import math

import jax
import jax.numpy as jnp

from kernels_pallas import compat
from kernels_pallas.dispatch import Problem

DTYPES = ("bfloat16", "float16", "float32")
MAX_CHUNK = 256  # a decoding step holds one chunk of keys in shared memory
MAX_STATES = 64  # of a channel: a tile of channels x states is one program's
LEAST_CHUNK = 16  # positions; below that (a decoding step has one) matrix units multiply padding
MAX_DIM = 128  # larger heads need smaller tiles than any that the tables of tile sizes hold


def machine(problem: Problem) -> str | None:
    """None, or why Triton kernels do not run here, or not unless they are asked for."""
    refusal = compat.triton_refusal(problem.platform)
    if refusal is not None:
        return refusal
    if problem.platform == "cpu" and not problem.is_named:
        return "on a CPU Triton's interpreter is for tests: it runs only when it is asked for by name"
    return None


def probe(problem: Problem) -> str | None:
    """None, or why Triton refuses: the machine, the dtypes, or the head dims (the operands' last axes)."""
    refusal = machine(problem)
    if refusal is not None:
        return refusal
    dtypes = _dtypes(problem.operands)
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        return f"operands are {' and '.join(dtypes)}; it takes one dtype for all, of {', '.join(DTYPES)}"
    dim = max(x.shape[-1] for x in problem.operands)
    if dim > MAX_DIM:
        return f"head dim {dim} is larger than {MAX_DIM}"
    return None


def _dtypes(operands: tuple) -> list[str]:
    return sorted({jnp.dtype(x.dtype).name for x in operands})


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


def state_scan(problem: Problem) -> str | None:
    """The machine; float32 alone, and `key_dim` rows of state in the registers of one program."""
    refusal = machine(problem) or _split(problem)
    if refusal is not None:
        return refusal
    if _dtypes(problem.operands) != ["float32"]:
        return f"operands are {' and '.join(_dtypes(problem.operands))}; it takes float32"
    if problem.options["key_dim"] > MAX_DIM:
        return f"key dim {problem.options['key_dim']} is larger than {MAX_DIM}"
    return None


def selective_scan(problem: Problem) -> str | None:
    """The machine; x, B and C (operands 0, 3, 4) in any of DTYPES, the rest float32; the states of a channel."""
    refusal = machine(problem) or _split(problem)
    if refusal is not None:
        return refusal
    x, dt, a, b, c, *rest = problem.operands
    names = _dtypes(problem.operands)
    if set(_dtypes((x, b, c))) - set(DTYPES) or _dtypes((dt, a, *rest)) != ["float32"]:
        return f"operands are {' and '.join(names)}; x, B, C may be {', '.join(DTYPES)}, the others float32"
    if a.shape[-1] > MAX_STATES:
        return f"{a.shape[-1]} states per channel are more than {MAX_STATES}"
    return None


def ssd(problem: Problem) -> str | None:
    """The machine; x (operand 0) in any of DTYPES, B and C (2, 3) follow it, the rest float32; the state's two dims."""
    refusal = machine(problem) or _split(problem)
    if refusal is not None:
        return refusal
    x, log_a, b, _, *rest = problem.operands
    names = _dtypes((x, log_a, *rest))
    if set(_dtypes((x,))) - set(DTYPES) or _dtypes((log_a, *rest)) != ["float32"]:
        return f"operands are {' and '.join(names)}; x may be {', '.join(DTYPES)}, decays and states float32"
    if max(x.shape[-1], b.shape[-1]) > MAX_DIM:
        return f"head dim {x.shape[-1]} or state {b.shape[-1]} is larger than {MAX_DIM}"
    if problem.options["chunk_size"] < LEAST_CHUNK and not problem.is_named:
        return f"{problem.options['chunk_size']} positions per chunk are less than a tile of {LEAST_CHUNK}"
    return None


def _split(problem: Problem) -> str | None:
    """XLA does not split a custom call over devices: it would gather the operands on each, and all would do all."""
    mesh = jax.sharding.get_abstract_mesh()
    if problem.is_named or mesh.empty:
        return None
    devices = math.prod(mesh.shape[axis] for axis in mesh.auto_axes)
    return f"arrays may be split over {devices} devices: inside jax.shard_map it runs" if devices > 1 else None
