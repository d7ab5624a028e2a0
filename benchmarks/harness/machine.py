"""What numbers were measured on."""

import os
from typing import Any

import jax

from seqjax.training.workdir import installed_versions, run_facts

# What a run of seqjax does not list among its versions, but what decides how fast something is.
PACKAGES = ("jax-cuda12-plugin", "jax-cuda13-plugin", "array_record", "sentencepiece", "zstandard")


def machine() -> dict[str, Any]:
    """Device, backend, cores, load, versions and commit."""
    facts = run_facts(backend=jax.default_backend(), cores=os.cpu_count(), load=os.getloadavg()[0])
    return facts | {"versions": facts["versions"] | installed_versions(PACKAGES)}
