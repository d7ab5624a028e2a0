"""Run Triton kernels on a CPU in Triton's interpreter, for tests.

If TRITON_INTERPRET=1 is in the environment before triton is first imported, kernels run as numpy programs. A kernel
call is then a `jax.pure_callback` (in `runtime.launch`) to a host function, which passes torch CPU tensors to the
kernel. The interpreter is slow: each array operation takes microseconds. It keeps global state, so a lock admits one
kernel at a time.
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
    """Return whether kernels run in the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def host_function(kernel: Any, out_shape: tuple, grid: tuple, constants: dict) -> Callable:
    """Return the host function of a kernel call, for `jax.pure_callback`.

    It maps input arrays to numpy arrays with the shapes and dtypes of `out_shape`. It runs no JAX computation, because
    a JAX computation inside the callback could deadlock.
    """

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        import torch

        patch_interpreter()
        inputs = [_to_torch(np.asarray(x)) for x in arrays]
        outputs = [_to_torch(_fresh(x.shape, np.dtype(x.dtype))) for x in out_shape]
        with _lock, torch.no_grad(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its loops convert one-element arrays to integers
            kernel[grid](*inputs, *outputs, **constants)
        return tuple(_to_numpy(x, np.dtype(shape.dtype)) for x, shape in zip(outputs, out_shape, strict=True))

    return run


def _fresh(shape: tuple, dtype: np.dtype) -> np.ndarray:
    """Return an array filled with NaN, or with the dtype's minimum for integers.

    Tests then detect an element that the kernel did not write. The minimum of an unsigned dtype is 0, which reveals
    nothing.
    """
    return np.full(shape, np.nan if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min, dtype)


def _to_torch(x: np.ndarray) -> Any:
    import torch

    x = np.array(x, order="C")  # a writable copy
    if x.dtype == jnp.bfloat16:  # numpy and torch have different bfloat16 types: copy the bits
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _to_numpy(x: Any, dtype: np.dtype) -> np.ndarray:
    import torch

    return x.view(torch.int16).numpy().view(dtype) if dtype == jnp.bfloat16 else x.numpy()


@cache
def patch_interpreter() -> None:
    """Patch two defects and one slow path of triton 3.6's interpreter.

    * bf16, which the interpreter stores as uint16: `tl.dot` multiplies the bit patterns, integer 1 cast to bf16 stores
      0x0001, and a cast from float32 truncates. Patched casts round to nearest even, as on the GPU. The patched
      `tl.dot` multiplies in float32; it equals the GPU's result up to the summation order. Elementwise bf16 arithmetic
      is not patched: kernels must cast to float32 first.
    * Loop bounds are one-element arrays. numpy 2.5 and later do not convert these to integers.
    * Each function call inside a kernel searches all names in the language for built-ins. This takes a quarter of the
      kernel's time, so the patch caches the list.
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
