"""Lowers every Triton call for a CUDA device that need not be there, through the jax_triton that is installed:

    python -m tests.kernels.lower_triton [80 | 90]

compile_triton.py replaces `runtime.launch`; this runs it, in jitted functions that are lowered for the platform "cuda":
jax_triton binds the kernel's arguments, Triton compiles to PTX, and the program holds one custom call per launch. The
compute capability is pretended. So are, where jaxlib's CUDA plugin is not installed, the records that carry a kernel to
the device: without them jax-triton 0.3 does not even import. One line of JSON per call. A process of its own, without
TRITON_INTERPRET: `@triton.jit` decides at import what a kernel is.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jaxlib.gpu_triton as records  # what jax_triton calls `gpu_triton`; all but empty without CUDA

TARGET = "triton_kernel_call"  # of the custom call; jax-triton 0.4 adds a suffix


class Record:
    """Stands for a record of jaxlib's plugin: takes what it is made of, and gives bytes."""

    def __init__(self, *parts: Any):
        self.parts = parts

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        """Bytes in place of a protocol buffer."""
        return name.encode() + metadata


def pretend(capability: int) -> bool:
    """Before jax_triton is imported: gives jaxlib what it lacks. Whether the plugin's own records are there."""
    has_plugin = hasattr(records, "TritonKernel")
    if not has_plugin:
        names = ("TritonKernel", "TritonKernelCall", "TritonAutotunedKernelCall")
        functions = ("create_array_parameter", "create_scalar_parameter", "get_serialized_metadata")
        for name in (*names, *functions):
            setattr(records, name, Record)
    setattr(records, "get_compute_capability", lambda device: capability)  # noqa: B010 - pyright knows no such name
    return has_plugin


def lower(f: Callable, *shapes: tuple) -> str:
    """The program of f on abstract arrays, `(shape, dtype)` each, for CUDA."""
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.jit(lambda *x: f(*x)).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", nargs="?", type=int, default=90)
    given = parser.parse_args()
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter has nothing to lower"
    has_plugin = pretend(given.capability)

    import jax_triton
    import triton

    from kernels_pallas import device
    from kernels_pallas.triton import runtime
    from tests.kernels import compile_triton

    versions = {"jax": jax.__version__, "jax_triton": jax_triton.__version__, "triton": triton.__version__}
    device.compute_capability = lambda: given.capability
    launches, launch = [], runtime.launch

    def counted(kernel: Any, *arrays: Any, **options: Any) -> Any:
        launches.append(kernel.fn.__name__)
        return launch(kernel, *arrays, **options)

    def lowered(f: Callable, *shapes: tuple) -> None:
        calls = lower(f, *shapes).count(f"@{TARGET}")
        report = {"case": case.name, "launches": list(launches), "calls": calls, "plugin": has_plugin}
        sys.stdout.write(json.dumps(report | versions) + "\n")
        launches.clear()

    runtime.launch, compile_triton.arrays = counted, lowered
    for case in compile_triton.CASES:
        case.call(dim=64, dtype="bfloat16")


if __name__ == "__main__":
    main()
