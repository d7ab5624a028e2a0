"""What identifies a run, for `run.json`: versions, devices and commit; and the memory that its device has used."""

import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax


def device_peak_bytes() -> int | None:
    """Return the peak memory in bytes of this process's first device, or None if the device does not report it."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def device_peak_gib() -> float | None:
    """Return `device_peak_bytes` in GiB."""
    peak = device_peak_bytes()
    return None if peak is None else peak / 2**30


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the packages that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def run_facts(**extra: Any) -> dict[str, Any]:
    """Return the facts that identify a run: versions, devices, processes and commit, with `extra` added."""
    packages = (
        "seqjax",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "numpy",
        "jax-triton",
        "triton",
    )
    here = Path(__file__).parent

    def git(*args: str) -> str:
        try:
            result = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=False)
        except FileNotFoundError:  # a container without git
            return ""
        return result.stdout.strip() if result.returncode == 0 else ""

    return {
        "python": platform.python_version(),
        "versions": installed_versions(packages),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "commit": git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else ""),
        **extra,
    }
