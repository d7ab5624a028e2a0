"""Sizes and precisions that several ops use when they launch Triton kernels."""

from typing import Any

import jax.numpy as jnp

from kernels_pallas import device
from kernels_pallas.triton import interpreter

CHUNK, SHORT_CHUNK = 64, 32  # maximal positions per chunk, for recurrences whose tiles hold a whole chunk on one axis


def longest_chunk(dtype: Any) -> int:
    """Return a recurrence's maximal chunk length, 64 or 32.

    Hopper reads 16-bit matrix operands from shared memory. Before Hopper, and for float32 on any GPU, they lie in
    registers, and a 64-position chunk needs more registers than there are.
    """
    is_hopper = (device.compute_capability() or device.AMPERE) >= device.HOPPER
    return CHUNK if interpreter.is_chosen() or (is_hopper and jnp.finfo(dtype).bits == 16) else SHORT_CHUNK


def block_of(most: int, dim: int) -> int:
    """Return the columns per block, `most` or half.

    It is half where this avoids a partly empty block. Example: 96 columns are 3 blocks of 32.
    """
    block = min(most, padded(dim))
    return block // 2 if block > 32 and dim % block and dim % (block // 2) == 0 else block


def padded(dim: int) -> int:
    """Return the next power of two, at least 16: the dim that `tl.dot` requires."""
    return max(16, 1 << (dim - 1).bit_length())


def precision(dtype: jnp.dtype) -> str:
    """Return `input_precision` for `tl.dot`.

    fp32 inputs use three TF32 products, nearly exact. For 16-bit inputs the setting has no effect.
    """
    return "tf32x3" if jnp.dtype(dtype) == jnp.float32 else "tf32"


def splits(programs: int, units: int, *, least: int) -> int:
    """Return the number of shares in a decoding step.

    Each of `programs` (batch x heads) has `units` of work to share. The target is about 8,192 programs, many more than
    a GPU runs at a time, so few programs finish late. There are at most 64 shares, with at least `least` units each
    (two in the interpreter, where contexts are short).
    """
    return max(1, min(8192 // programs, 64, units // (2 if interpreter.is_chosen() else least)))
