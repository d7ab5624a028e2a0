"""Launch Triton kernels.

Only this module depends on jax_triton and triton versions. A kernel is a plain `@triton.jit` function. `launch` calls
it as

    kernel(*input pointers, *output pointers, **constants)          constants, scalars included, are constexpr

On a GPU this goes through jax_triton: an FFI custom call, compiled ahead of time, without Python at run time. On a CPU
it goes through Triton's interpreter, for tests (interpreter.py).

Shapes are static, so strides are constants. Kernels get no null pointers and no aliased buffers: for an input that a
variant does not read, pass any array.
"""

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax

from kernels_pallas import device
from kernels_pallas.triton import interpreter

log = logging.getLogger("kernels_pallas")


def refusal(platform: str) -> str | None:
    """Return why Triton kernels cannot run on `platform` here, or None.

    Imports jax_triton only on a GPU.
    """
    if platform == "cpu":
        if not interpreter.is_chosen():
            return "Triton kernels need a GPU; on a CPU they run in Triton's interpreter, with TRITON_INTERPRET=1 set"
        missing = [name for name in ("triton", "torch") if importlib.util.find_spec(name) is None]
        return (
            f"Triton's interpreter needs {' and '.join(missing)}: pip install 'seqjax[interpret]'" if missing else None
        )
    if platform not in ("gpu", "cuda"):
        return f"Triton kernels need an NVIDIA GPU, this is a {platform}"
    if interpreter.is_chosen():
        return "TRITON_INTERPRET=1 is set: the interpreter runs on a CPU only"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'seqjax[cuda13]' or 'seqjax[cuda12]'"
    try:
        importlib.import_module("jax_triton")
    except ImportError as error:  # not installed, or jaxlib has no CUDA, or incompatible versions
        return f"jax_triton does not import ({str(error).splitlines()[0]}): pip install 'seqjax[cuda13]' or '[cuda12]'"
    capability = device.compute_capability()
    if capability is None:
        return "Triton kernels need an NVIDIA GPU with CUDA, this one reports no compute capability"
    if capability < device.AMPERE:
        return f"the GPU has compute capability {capability / 10}, the kernels need {device.AMPERE / 10} or later"
    if capability > device.HOPPER:
        _report_newer_gpu(capability)
        return (
            f"the GPU has compute capability {capability / 10}; the kernels are tested up to {device.HOPPER / 10}, and "
            "Triton can compute wrong values on later GPUs (triton-lang/triton#10821)"
        )
    return None


@cache
def _report_newer_gpu(capability: int) -> None:
    """Log once per process that ops do not use Triton on this GPU."""
    log.warning(
        "Triton kernels are off on this GPU (compute capability %s; tested up to %s, see triton-lang/triton#10821): "
        "ops run on cuDNN or XLA, which can be slower.",
        capability / 10,
        device.HOPPER / 10,
    )


def launch(
    kernel: Any,
    *arrays: jax.Array,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    name: str = "",
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Run a Triton kernel once over `grid` and return its outputs.

    It is not differentiable. batching.py adds vmap and sharding.

    Args:
      kernel: a `@triton.jit` function with the parameters inputs, outputs, then constexpr values.
      *arrays: arrays for the input pointers, row-major and contiguous.
      out_shape: shape and dtype of each output. Output memory is not initialised: the kernel must write all of it.
      grid: programs on up to three axes; at most 2^31 - 1 on the first, 65,535 on the second and third.
      num_warps: warps per program.
      num_stages: depth of the loops' software pipeline.
      name: the call's name in profiles; by default the kernel's name.
      **constants: all constexpr parameters.
    """
    out_shape = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_shape)
    name = name or kernel.fn.__name__
    if interpreter.is_chosen():
        run = interpreter.host_function(kernel, out_shape, grid, constants)
        outs = jax.pure_callback(run, out_shape, *arrays)
    else:
        jax_triton: Any = importlib.import_module("jax_triton")  # needs jaxlib with CUDA, unknown to pyright
        outs = jax_triton.triton_call(
            *arrays,
            kernel=kernel,
            grid=grid,
            name=name,
            num_warps=num_warps,
            num_stages=num_stages,
            **call_options(tuple(jax_triton.__version_info__[:2]), out_shape),
            **constants,
        )
    return tuple(outs)


def call_options(version: tuple[int, int], out_shape: tuple[jax.ShapeDtypeStruct, ...]) -> dict[str, Any]:
    """Return the version-dependent arguments of jax_triton's `triton_call`.

    Multiply-add fusion is set explicitly because Triton 3.10 disables it by default. Without it kernels are slower and
    results have different bits.
    """
    if version < (0, 4):
        return {"out_shape": out_shape, "enable_fp_fusion": True}
    return {"out_type": out_shape, "backend_options": {"enable_fp_fusion": True}}
