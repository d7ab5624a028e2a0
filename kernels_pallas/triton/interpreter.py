"""Triton's interpreter on a CPU, for tests: kernels run as numpy programs, without a GPU.

With TRITON_INTERPRET=1 in the environment before triton is first imported, a call becomes a `jax.pure_callback` over
torch CPU tensors. The interpreter is slow (microseconds per array operation) and keeps global state, hence the lock.
"""

import inspect
import os
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

_lock = threading.Lock()


def is_chosen() -> bool:
    """Whether kernels run in the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def host_function(kernel: Any, out_shape: tuple, grid: tuple, constants: dict) -> Callable:
    """Return the host function of a call: numpy arrays alone, and never a call of jax, which could wait for itself."""

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        import torch

        _patch_interpreter()
        inputs = [_to_torch(np.asarray(x)) for x in arrays]
        outputs = [_to_torch(_fresh(x.shape, np.dtype(x.dtype))) for x in out_shape]
        with _lock, torch.no_grad(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its loops turn arrays of one element into integers
            kernel[grid](*inputs, *outputs, **constants)
        return tuple(_to_numpy(x, np.dtype(shape.dtype)) for x, shape in zip(outputs, out_shape, strict=True))

    return run


def _fresh(shape: tuple, dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory at its worst, so that an element nobody wrote shows: NaN, or the most negative integer."""
    return np.full(shape, np.nan if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min, dtype)


def _to_torch(x: np.ndarray) -> Any:
    import torch

    x = np.array(x, order="C")  # writable and its own
    if x.dtype == jnp.bfloat16:  # numpy's bfloat16 is not torch's: by bits
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _to_numpy(x: Any, dtype: np.dtype) -> np.ndarray:
    import torch

    return x.view(torch.int16).numpy().view(dtype) if dtype == jnp.bfloat16 else x.numpy()


@cache
def _patch_interpreter() -> None:
    """Mend what triton 3.6's interpreter does wrong.

    bf16 becomes as on a GPU: it multiplies matrices of its bits, turns 1 into bits 1, and rounds down. The bounds of a
    loop are arrays of one element, which numpy 2.5 and later do not turn into an integer. At every call of a function
    inside a kernel it looks for the built-ins of the language among all its names, a quarter of the time of a kernel.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    cast_impl, create_dot = builder.cast_impl, builder.create_dot

    def widened(x: Any) -> Any:
        is_bf16 = x.dtype.scalar == tl.bfloat16
        return handle(x.data.view(jnp.bfloat16).astype(np.float32), tl.float32) if is_bf16 else x

    def cast_to_nearest(self: Any, x: Any, dst_type: Any) -> Any:
        x = widened(x)
        if dst_type.scalar == tl.bfloat16:
            return handle(x.data.astype(np.float32).astype(jnp.bfloat16).view(np.uint16), tl.bfloat16)
        return cast_impl(self, x, dst_type)

    def create_dot_of_bf16(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    builder.cast_impl, builder.create_dot = cast_to_nearest, create_dot_of_bf16
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_with_index

    @cache
    def builtins(module: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]

    def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        for name in builtins(module):
            member = getattr(module, name)
            if tl.core.is_builtin(member):  # not yet patched
                interpreter._patch_attr(module, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
