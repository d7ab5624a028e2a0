"""The platform and GPU generation on which computations run."""

import importlib
from functools import cache

import jax

AMPERE = 80  # compute capability of the A100, the first with bf16 matrix units and asynchronous copies
HOPPER = 90  # compute capability of the H100 and H200, which have `wgmma`


def platform() -> str:
    """Return the platform of an unplaced computation.

    This is JAX's default device, or its default backend.
    """
    device = getattr(jax.config, "jax_default_device", None)  # None, a Device, or a platform name
    return jax.default_backend() if device is None else getattr(device, "platform", str(device))


@cache
def compute_capability() -> int | None:
    """Return the first GPU's compute capability times 10; None without NVIDIA GPU.

    80 is an A100, 90 an H100 or H200.
    """
    try:
        major, _, minor = str(jax.devices("gpu")[0].compute_capability).partition(".")
        return 10 * int(major) + int(minor)
    except (RuntimeError, AttributeError, ValueError):  # no GPU, or a GPU from another vendor
        return None


@cache
def multiprocessors() -> int | None:
    """Return how many multiprocessors the first GPU has; None without one."""
    try:
        return getattr(jax.devices("gpu")[0], "core_count", None)
    except RuntimeError:
        return None


@cache
def cudnn_version() -> int | None:
    """Return the version of cuDNN that JAX has loaded, or None.

    91002 means 9.10.2.
    """
    try:
        return importlib.import_module("jax._src.lib").cuda_versions.cudnn_get_version()
    except (ImportError, AttributeError, RuntimeError):
        return None
