"""Where computations run: the platform, and the generation of its GPU."""

import importlib
from functools import cache

import jax

AMPERE = 80  # compute capability of the A100: bf16 matrix units and asynchronous copies begin with it
HOPPER = 90  # of the H100 and H200, which have `wgmma`


def platform() -> str:
    """Return where an unplaced computation runs: JAX's default device, or default backend."""
    device = getattr(jax.config, "jax_default_device", None)  # None, a Device, or a platform name
    return jax.default_backend() if device is None else getattr(device, "platform", str(device))


@cache
def compute_capability() -> int | None:
    """Return that of the first GPU, 80 for an A100, 90 for an H100 or H200; None without an NVIDIA GPU."""
    try:
        major, _, minor = str(jax.devices("gpu")[0].compute_capability).partition(".")
        return 10 * int(major) + int(minor)
    except (RuntimeError, AttributeError, ValueError):  # no GPU, or a GPU with other counters
        return None


@cache
def cudnn_version() -> int | None:
    """Return the version of cuDNN that JAX has loaded, 91002 for 9.10.2; None without it."""
    try:
        return importlib.import_module("jax._src.lib").cuda_versions.cudnn_get_version()
    except (ImportError, AttributeError, RuntimeError):
        return None
