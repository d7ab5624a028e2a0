"""How a run was produced: versions, devices, backends, commit (for run.json)."""

import contextlib
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import kernels_pallas


def device_peak_bytes() -> int | None:
    """Return the peak memory of this process's first device in bytes.

    Returns None if the device does not report it.
    """
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def device_peak_gib() -> float | None:
    """Return `device_peak_bytes` in GiB."""
    peak = device_peak_bytes()
    return None if peak is None else peak / 2**30


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


# The form of `run_metadata`, with the number of parameters, in `run.json`.
RUN = {"versions": {str: str}, "device": str, "devices": int, "backends": dict, "commit": str, "parameters": int}


def run_metadata(**extra: Any) -> dict[str, Any]:
    """Return a run's versions, devices, kernel backends and commit, and `extra`."""
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
    return {
        "python": platform.python_version(),
        "versions": installed_versions(packages),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "backends": kernels_pallas.backends_used(),
        "commit": commit_of(Path(__file__).parents[1]),
        **extra,
    }


def commit_of(package: Path) -> str:
    """Return the git commit of the code in the directory `package`; "" if unknown.

    "-dirty" is appended after local changes. A copy without a git history has the commit in a file COMMIT. A wheel
    contains this file. For a copied checkout, `git rev-parse HEAD > seqjax/COMMIT` writes it.
    """
    # Parent directories are not searched: seqjax may be in the virtual environment of another project.
    if (package.parent / ".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with contextlib.suppress(FileNotFoundError):  # a container without git
            done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout.strip()
    recorded = package / "COMMIT"
    return recorded.read_text(encoding="utf-8").strip() if recorded.is_file() else ""
