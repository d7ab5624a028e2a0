"""Describes the machine of a measurement."""

import os
from typing import Any

import jax

from seqjax.training.provenance import installed_versions, run_metadata

# Packages that affect speed but are not in a run's versions.
PACKAGES = ("jax-cuda12-plugin", "jax-cuda13-plugin", "array_record", "sentencepiece", "zstandard")


def machine() -> dict[str, Any]:
    """Return device, backend, cores, load, versions and commit."""
    metadata = run_metadata(backend=jax.default_backend(), cores=os.cpu_count(), load=os.getloadavg()[0])
    return metadata | {"versions": metadata["versions"] | installed_versions(PACKAGES)}
