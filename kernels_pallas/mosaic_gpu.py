"""Pallas Mosaic GPU across jax versions: machine check, kernel construction."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from kernels_pallas import device


def refusal(platform: str) -> str | None:
    """Return why Pallas Mosaic GPU kernels cannot run on `platform`, or None.

    The kernels use `wgmma`.
    """
    options: Any = jax.config  # type checkers do not know the options
    if options.jax_enable_x64:  # Pallas mixes int32 and int64 indices then
        return "Pallas Mosaic GPU kernels need jax_enable_x64 to be off"
    if platform not in ("cpu", "gpu", "cuda"):
        return f"Pallas Mosaic GPU kernels need an NVIDIA GPU, this is a {platform}"
    try:
        mosaic: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError as error:
        return f"Pallas Mosaic GPU does not import ({str(error).splitlines()[0]})"
    if platform == "cpu":
        return None if hasattr(mosaic, "InterpretGPUParams") else "this jax has no interpreter for Pallas Mosaic GPU"
    capability = device.compute_capability()
    if capability is None:
        return "Pallas Mosaic GPU kernels need an NVIDIA GPU with CUDA, this one reports no compute capability"
    if capability != device.HOPPER:  # later GPUs have other matrix instructions
        return f"the GPU has compute capability {capability / 10}, the kernel needs Hopper's, {device.HOPPER / 10}"
    return None


def kernel(
    body: Callable,
    *,
    out_type: Any,
    scratch_types: Sequence[Any],
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    num_threads: int,
    thread_name: str,
    interpret: bool,
    name: str | None = None,
) -> Callable:
    """Return `plgpu.kernel` of these arguments; profiles show `name`.

    Exponentials and logarithms use the special-function unit. With `interpret`, JAX's CPU interpreter runs the kernel.
    """
    plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # names vary by version
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    mode: Any = plgpu.InterpretGPUParams() if interpret else False
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=grid,
        grid_names=grid_names,
        num_threads=num_threads,
        thread_name=thread_name,
        compiler_params=params,
        interpret=mode,
        kernel_name=name,
    )


def transposed(ref: Any) -> Any:
    """Return a transposed view of a matrix in shared memory."""
    if jax.__version_info__ >= (0, 11):
        return ref.transpose((1, 0))
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu").transpose_ref(ref, (1, 0))
