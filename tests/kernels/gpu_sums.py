"""Give Triton's interpreter a GPU's order of sums.

Reductions add by halves, running sums by doubling, float32 products in steps of three TF32 products. numpy adds one row
after the other, in reductions and running sums alike. A kernel that needs equal rounding of two sums therefore passes
in the interpreter and can fail on a GPU.
"""

import importlib
from typing import Any

import numpy as np
import pytest

from kernels_pallas.triton.interpreter import patch_interpreter

STEP = 8  # terms that a matrix product adds at a time, as TF32 instructions do


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the order in the interpreter until the test ends; products of bf16 keep theirs."""
    patch_interpreter()  # otherwise the first kernel call would patch these functions once more
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    usual_dot, handle = interpreter.InterpreterBuilder.create_dot, interpreter.TensorHandle

    def reduce(op: Any, x: Any) -> Any:
        if op.axis is None:
            return op.to_tensor(np.sum(x.handle.data), x.dtype)
        y = by_halves(np.moveaxis(x.handle.data, op.axis, 0))
        return op.to_tensor(np.expand_dims(y, op.axis) if op.keep_dims else y, x.dtype)

    def scan(op: Any, x: Any) -> list[Any]:
        y = by_doubling(np.moveaxis(x.handle.data, op.axis, 0))
        return [op.to_tensor(np.moveaxis(y, 0, op.axis), dtype=x.dtype)]

    def dot(builder: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
        if a.data.dtype != np.float32 or a.data.ndim != 2:
            return usual_dot(builder, a, b, sums, *options)
        y, left, right = sums.data, in_tf32(a.data), in_tf32(b.data)
        for k in range(0, a.data.shape[1], STEP):
            for i, j in ((1, 0), (0, 1), (0, 0)):
                y = y + left[i][:, k : k + STEP] @ right[j][k : k + STEP]
        return handle(y, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.ReduceOps, "sum", reduce)
    monkeypatch.setattr(interpreter.ScanOps, "cumsum", scan)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def in_tf32(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two TF32 numbers (10 bits of mantissa) whose sum is x to 21 bits: the parts of a product `tf32x3`."""
    high = (x.view(np.uint32) & 0xFFFFE000).view(np.float32)
    low = ((x - high).view(np.uint32) & 0xFFFFE000).view(np.float32)
    return high, low


def by_halves(x: np.ndarray) -> np.ndarray:
    """Return the sum over axis 0."""
    while len(x) > 1:
        half = len(x) // 2
        x = np.concatenate([x[:half] + x[half : 2 * half], x[2 * half :]])
    return x[0]


def by_doubling(x: np.ndarray) -> np.ndarray:
    """Return the running sum over axis 0."""
    step = 1
    while step < len(x):
        x = np.concatenate([x[:step], x[step:] + x[:-step]])
        step *= 2
    return x
