"""Time the kernels of flash-linear-attention and FlashQLA on torch, for benchmarks.scans.

They receive our operands, with beta in the dtype of the keys, as fla's layers do. Checked with versions 0.6.0 of
flash-linear-attention and fla-core, and 0.1.3 of flash-qla.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import torch_flash

# Case of benchmarks.scans -> operand names in order, and the function in `ops`.
FLA = {
    "delta_rule": (("q", "k", "v", "beta", "initial_state"), "delta_rule.chunk_delta_rule"),
    "gated_delta_rule": (("q", "k", "v", "beta", "initial_state", "g"), "gated_delta_rule.chunk_gated_delta_rule"),
    "gla": (("q", "k", "v", "g", "initial_state"), "gla.chunk_gla"),
    "wkv6": (("r", "k", "v", "w", "initial_state", "u"), "rwkv6.chunk_rwkv6"),
    "wkv7": (("r", "k", "v", "w", "initial_state", "a", "b"), "rwkv7.chunk_rwkv7"),
    "kda": (("q", "k", "v", "g", "initial_state", "beta"), "kda.chunk_kda"),
}
CALLS = {"fla": FLA, "flash_qla": {"gated_delta_rule": FLA["gated_delta_rule"]}}  # by package
DISTRIBUTIONS = {"fla": "flash-linear-attention", "flash_qla": "flash-qla"}


def available(case: str, dim: int) -> list[str]:
    """Return the installed packages with a kernel for a case and a head dimension; none without torch on a CUDA device.

    FlashQLA has only heads of 128.
    """
    having = [package for package, calls in CALLS.items() if case in calls and (package == "fla" or dim == 128)]
    installed = [package for package in having if importlib.util.find_spec(package) is not None]
    return installed if torch_flash.is_available() else []


def function(package: str, case: str) -> Callable[..., Any]:
    """Return a package's function for a case."""
    module, _, name = CALLS[package][case][1].partition(".")
    return getattr(importlib.import_module(f"{package}.ops.{module}"), name)


def operands(case: str, arrays: Sequence[jax.Array], device: str) -> dict[str, Any]:
    """Return a case's operands as tensors by name."""
    import torch

    if case == "kda":  # ours are beta k and -e^g k
        r, scaled, v, log_w, initial, a = arrays
        k = -a.astype(jnp.float32) * jnp.exp(-log_w)
        arrays = (r, k.astype(r.dtype), v, log_w, initial, (scaled * k).sum(-1))
    tensors = {}
    for name, x in zip(FLA[case][0], arrays, strict=True):
        dtype = jnp.dtype(arrays[1].dtype if name == "beta" else x.dtype).name
        wide = torch.from_numpy(np.array(x.astype(jnp.float32)))
        tensors[name] = wide.to(device, getattr(torch, dtype))
    return tensors


def measure(
    package: str, case: str, arrays: Sequence[jax.Array], cotangent: Any, *, repeats: int, seconds: float
) -> dict[str, Any]:
    """Return the times in ms (forward, and forward with backward) and the outputs as float32 arrays.

    Plain times include host pauses between kernel launches. `device_*` times cover kernels only.
    """
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_CACHE_DIR", None)  # jax_triton sets it to "", and Triton then cannot build its driver
        return _measure(function(package, case), operands(case, arrays, "cuda"), cotangent, repeats, seconds) | {
            "versions": {name: importlib.metadata.version(name) for name in ("torch", DISTRIBUTIONS[package])}
        }


def _measure(
    f: Callable[..., Any], tensors: dict[str, Any], cotangent: Any, repeats: int, seconds: float
) -> dict[str, Any]:
    import torch

    run = {"scale": 1.0, "output_final_state": True}

    def forward() -> Any:
        with torch.no_grad():
            return f(**tensors, **run)

    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out = [x.float().cpu().numpy() for x in forward()]
    grads = [torch.from_numpy(np.array(x.astype(jnp.float32))).cuda() for x in cotangent]

    def training() -> None:
        results = f(**leaves, **run)
        cast_grads = [g.to(x.dtype) for g, x in zip(grads, results, strict=True)]
        torch.autograd.grad(results, list(leaves.values()), cast_grads)

    def median(call: Callable[[], Any]) -> float:
        return statistics.median(torch_flash.time_ms(call, repeats=repeats, seconds=seconds))

    measured: dict[str, Any] = {"forward_ms": median(forward), "device_forward_ms": _device_ms(forward), "out": out}
    try:
        measured |= {"training_ms": median(training), "device_training_ms": _device_ms(training)}
    except RuntimeError as error:  # fla's gated_delta_rule refuses some Triton versions on Hopper
        measured["training_error"] = str(error)
    return measured


def _device_ms(call: Callable[[], Any], *, calls: int = 10) -> float:
    """Return the kernel time of a call in ms, without gaps between kernels."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / calls / 1e3
