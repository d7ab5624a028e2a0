"""Choices that the launches of several ops share: chunks, blocks, padding, precision of products, shares of a decoding
step.
"""

from typing import Any

import jax.numpy as jnp

from kernels_pallas import device
from kernels_pallas.triton import interpreter

CHUNK, SHORT_CHUNK = 64, 32  # positions at most of the recurrences whose tiles hold a whole chunk along one axis


def longest_chunk(dtype: Any) -> int:
    """Return the positions per chunk at most: 32 before Hopper, whose products take operands from shared memory.

    There, and for float32 everywhere, operands lie in registers, of which chunks of 64 need more than there are.
    """
    is_hopper = (device.compute_capability() or device.AMPERE) >= device.HOPPER
    return CHUNK if interpreter.is_chosen() or (is_hopper and jnp.finfo(dtype).bits == 16) else SHORT_CHUNK


def block_of(most: int, dim: int) -> int:
    """Return the columns per block: `most`, or half of that where it leaves no block in part empty (96 is 3 x 32)."""
    block = min(most, padded(dim))
    return block // 2 if block > 32 and dim % block and dim % (block // 2) == 0 else block


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
