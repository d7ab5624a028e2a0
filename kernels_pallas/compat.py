"""The one place that knows the versions of jax, jax_triton and triton: whether Triton kernels run, and how.

A kernel is a plain `@triton.jit` function. `launch` calls it as

    kernel(*input pointers, *output pointers, **constants)          constants are constexpr, scalars included

on a GPU through jax_triton (an FFI custom call, compiled ahead, no Python at run time), and on a CPU in Triton's
interpreter, for tests: with TRITON_INTERPRET=1 in the environment before triton is first imported, through
`jax.pure_callback` and torch CPU tensors. The interpreter is slow (microseconds per array operation) and keeps global
state, hence the lock.

Shapes are static, so strides are constants. A kernel gets no null pointers and no aliasing: an input that a variant
does not read is still some array.
"""

import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

OLDEST = 80  # compute capability: bf16 matrix units and asynchronous copies begin with the A100

_interpreter = threading.Lock()


def triton_refusal(platform: str) -> str | None:
    """Why Triton kernels cannot run on `platform` here; None when they can. Imports jax_triton only on a GPU."""
    if platform == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton kernels need a GPU; on a CPU they run in Triton's interpreter, with TRITON_INTERPRET=1 set"
        missing = [name for name in ("triton", "torch") if importlib.util.find_spec(name) is None]
        return (
            f"Triton's interpreter needs {' and '.join(missing)}: pip install 'seqjax[interpret]'" if missing else None
        )
    if platform not in ("gpu", "cuda"):
        return f"Triton kernels need an NVIDIA GPU, this is a {platform}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: the interpreter runs on a CPU only"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'seqjax[cuda13]' or 'seqjax[cuda12]'"
    try:
        importlib.import_module("jax_triton")
    except ImportError as error:  # not installed, or it is and jaxlib has no CUDA, or the two do not fit
        return f"jax_triton does not import ({str(error).splitlines()[0]}): pip install 'seqjax[cuda13]' or '[cuda12]'"
    capability = compute_capability()
    if capability is None:
        return "Triton kernels need an NVIDIA GPU with CUDA, this one names no compute capability"
    if capability < OLDEST:
        return f"the GPU has compute capability {capability / 10}, the kernels need {OLDEST / 10} or later"
    return None


def is_interpreted() -> bool:
    """Whether kernels run in the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def compute_capability() -> int | None:
    """80 for an A100, 90 for an H100 or H200; of the first GPU. None without one, and in the interpreter."""
    if is_interpreted():
        return None
    try:
        major, _, minor = str(jax.devices("gpu")[0].compute_capability).partition(".")
        return 10 * int(major) + int(minor)
    except (RuntimeError, AttributeError, ValueError):  # no GPU, or one that counts otherwise
        return None


def launch(
    kernel: Any,
    *arrays: jax.Array,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    zeroed: tuple[int, ...] = (),
    name: str = "",
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs a Triton kernel once over `grid` and returns its outputs; not differentiable, not batched by `jax.vmap`.

    Args:
      kernel: a `@triton.jit` function whose parameters are the inputs, the outputs and then constexpr ones.
      *arrays: what the input pointers point to, row-major and contiguous.
      out_shape: of every output. Memory is not initialised: the kernel writes it all, or it is `zeroed`.
      grid: programs along up to three axes; the first may have 2^31 - 1, the others 65,535.
      num_warps: warps per program.
      num_stages: depth of the software pipeline of loops.
      zeroed: indices of outputs that start as zeros.
      name: of the call in profiles; the kernel's own by default.
      **constants: the constexpr parameters, every one of them.
    """
    out_shape = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_shape)
    name = name or kernel.fn.__name__
    # under shard_map an output varies over the mesh axes that any input varies over; neither call says so itself
    axes = frozenset().union(*(getattr(jax.typeof(x), "vma", frozenset()) for x in arrays))
    if is_interpreted():
        outs = jax.pure_callback(_interpret(kernel, out_shape, grid, zeroed, constants), out_shape, *arrays)
    else:
        jax_triton: Any = importlib.import_module("jax_triton")  # on a GPU alone: pyright sees a CPU

        # 0.4 renamed out_shape; 0.3 would hand the new name to the kernel
        shape_argument = "out_type" if tuple(jax_triton.__version_info__[:2]) >= (0, 4) else "out_shape"
        with warnings.catch_warnings():
            # 0.4 wants mutable references in place of zeroed_outputs, 0.3 knows only the latter
            warnings.filterwarnings("ignore", "zeroed_outputs is deprecated", DeprecationWarning)
            outs = jax_triton.triton_call(
                *arrays,
                kernel=kernel,
                grid=grid,
                name=name,
                num_warps=num_warps,
                num_stages=num_stages,
                zeroed_outputs=tuple(zeroed),
                **{shape_argument: out_shape},
                **constants,
            )
    if axes:
        outs = [jax.lax.pcast(x, tuple(axes), to="varying") for x in outs]
    return tuple(outs)


def _interpret(kernel: Any, out_shape: tuple, grid: tuple, zeroed: tuple, constants: dict) -> Callable:
    """The host function of a call. It sees numpy arrays alone and never calls jax, which could wait for itself."""

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        import torch

        _patch_interpreter()
        inputs = [_to_torch(np.asarray(x)) for x in arrays]
        outputs = [_to_torch(_fresh(x.shape, np.dtype(x.dtype), i in zeroed)) for i, x in enumerate(out_shape)]
        with _interpreter, torch.no_grad(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its loops turn arrays of one element into integers
            kernel[grid](*inputs, *outputs, **constants)
        return tuple(_to_numpy(x, np.dtype(shape.dtype)) for x, shape in zip(outputs, out_shape, strict=True))

    return run


def _fresh(shape: tuple, dtype: np.dtype, zero: bool) -> np.ndarray:
    """Uninitialised memory at its worst, so that an element nobody wrote shows: NaN, or the most negative integer."""
    if zero:
        return np.zeros(shape, dtype)
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
    """bf16 as on a GPU: triton 3.6's interpreter multiplies matrices of its bits, turns 1 into bits 1, rounds down."""
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
