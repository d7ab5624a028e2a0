"""Lower every Triton call for CUDA with the installed jax_triton, without a GPU:

    python -m tests.kernels.lower_triton [80 | 90]

compile_triton.py replaces `runtime.launch`; this module runs it in jitted functions that are lowered for the platform
"cuda". jax_triton binds the kernel arguments, Triton compiles to PTX, and the program has one custom call per launch.
The compute capability is simulated. Without jaxlib's CUDA plugin, so are the records that carry a kernel to the device,
because jax-triton 0.3 does not import without them. The output has one line of JSON per call. It runs in a separate
process without TRITON_INTERPRET, because `@triton.jit` chooses compiler or interpreter at import.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jaxlib.gpu_triton as records  # jax_triton's `gpu_triton`; nearly empty without CUDA

TARGET = "triton_kernel_call"  # custom-call target; jax-triton 0.4 adds a suffix


class Record:
    """Replace a record in jaxlib's plugin.

    It accepts any arguments and serialises to bytes.
    """

    def __init__(self, *parts: Any):
        self.parts = parts

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        """Return bytes instead of a protocol buffer."""
        return name.encode() + metadata


def pretend(capability: int) -> bool:
    """Add missing records to jaxlib; return whether the CUDA plugin is installed.

    Call this before importing jax_triton.
    """
    has_plugin = hasattr(records, "TritonKernel")
    if not has_plugin:
        names = ("TritonKernel", "TritonKernelCall", "TritonAutotunedKernelCall")
        functions = ("create_array_parameter", "create_scalar_parameter", "get_serialized_metadata")
        for name in (*names, *functions):
            setattr(records, name, Record)
    setattr(records, "get_compute_capability", lambda device: capability)  # noqa: B010 - pyright does not know the name
    return has_plugin


def lower(f: Callable, *shapes: tuple) -> str:
    """Return the program of f for CUDA, on abstract arrays given as `(shape, dtype)`."""
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.jit(lambda *x: f(*x)).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", nargs="?", type=int, default=90)
    arguments = parser.parse_args()
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter has nothing to lower"
    has_plugin = pretend(arguments.capability)

    import jax_triton
    import triton

    from kernels_pallas import device
    from kernels_pallas.triton import runtime
    from tests.kernels import compile_triton

    versions = {"jax": jax.__version__, "jax_triton": jax_triton.__version__, "triton": triton.__version__}
    device.compute_capability = lambda: arguments.capability
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
