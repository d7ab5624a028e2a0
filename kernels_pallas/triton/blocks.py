"""Choices that the launches of several ops share: padding, precision of products, shares of a decoding step."""

import jax.numpy as jnp

from kernels_pallas.triton import interpreter


def padded(dim: int) -> int:
    """Return the power of two, at least 16, that a dim is padded to inside a kernel: what `tl.dot` takes."""
    return max(16, 1 << (dim - 1).bit_length())


def precision(dtype: jnp.dtype) -> str:
    """Return `input_precision` of `tl.dot`: fp32 as three TF32 products, nearly exact; else there is no choice."""
    return "tf32x3" if jnp.dtype(dtype) == jnp.float32 else "tf32"


def splits(programs: int, units: int, *, least: int) -> int:
    """Return into how many shares a decoding step cuts `units` of work that `programs` (batch x heads) each have.

    The target is about 8,192 programs, many more than any GPU runs at a time, so that few finish last. There are at
    most 64 shares of at least `least` units each (two in the interpreter, where contexts are short).
    """
    return max(1, min(8192 // programs, 64, units // (2 if interpreter.is_chosen() else least)))
