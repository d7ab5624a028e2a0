"""What numbers were measured on."""

import os
from typing import Any

import jax

from seqjax.training.workdir import installed_versions, run_metadata

# What a run of seqjax does not list among its versions, but what decides how fast something is.
PACKAGES = ("jax-cuda12-plugin", "jax-cuda13-plugin", "array_record", "sentencepiece", "zstandard")


def machine() -> dict[str, Any]:
    """Device, backend, cores, load, versions and commit."""
    metadata = run_metadata(backend=jax.default_backend(), cores=os.cpu_count(), load=os.getloadavg()[0])
    return metadata | {"versions": metadata["versions"] | installed_versions(PACKAGES)}
