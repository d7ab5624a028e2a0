"""Compiled programs are kept on disk between processes."""

import os
from pathlib import Path

import jax


def use_compile_cache() -> None:
    """Keep the programs of accelerators in JAX_COMPILATION_CACHE_DIR, or else in ~/.cache/seqjax/xla.

    Accelerators save minutes; CPU programs compile in seconds, and a cached one is tied to the exact machine.
    """
    # The default is set here, not in the environment, so that a laptop without a cache directory still starts.
    if jax.default_backend() != "cpu":
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "seqjax" / "xla"))
        jax.config.update("jax_compilation_cache_dir", cache)
