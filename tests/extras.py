"""Packages that only some tests need, with the pyproject.toml extra that installs them.

A test without its packages is skipped, and the reason names the extra. CI installs `test-all`, so there the test fails
instead.
"""

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest

EXTRA_OF = {
    "dask": "test-dask",
    "datasets": "test-harness",
    "distributed": "test-dask",
    "furo": "docs",
    "gcp_storage_emulator": "test-stores",
    "gcsfs": "test-stores",
    "huggingface_hub": "hf",
    "jax_triton": "interpret",
    "lm_eval": "test-harness",
    "mistral_common": "mixtral",
    "myst_parser": "docs",
    "pyarrow": "parquet",
    "sentencepiece": "mixtral",
    "sphinx": "docs",
    "tensorflow_datasets": "test-tfds",
    "tokenizers": "hf",
    "torch": "interpret",
    "transformers": "test-harness",
    "triton": "interpret",
    "wonderwords": "test-harness",
}


def in_ci() -> bool:
    """Return whether this is CI, which sets `CI=true`."""
    return os.environ.get("CI", "").lower() in ("1", "true")


def lacking(*packages: str) -> str | None:
    """Return what to install for `packages`, or None if all are installed; imports nothing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    extras = ",".join(sorted({EXTRA_OF[name] for name in packages if name in missing}))
    return f"needs {', '.join(missing)}: pip install -e '.[{extras}]'" if missing else None


def need(*packages: str) -> None:
    """Skip the test, or the module during collection, if a package is missing; fail in CI."""
    __tracebackhide__ = True
    why = lacking(*packages)
    if why and in_ci():
        pytest.fail(f"{why}; CI has every extra of the tests", pytrace=False)
    if why:
        pytest.skip(why, allow_module_level=True)


def package(name: str) -> Any:
    """Return the imported package after `need`; ignores warnings from its import."""
    need(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


class Lazy:
    """A module imported at its first use: workers collect all files but run only some."""

    def __init__(self, load: Callable[[], Any]):
        self._load = load

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("__", "_pytest", "pytest")):  # pytest inspects all globals of a test file
            raise AttributeError(attribute)
        return getattr(self._load(), attribute)


def lazy(name: str) -> Any:
    """Return the package of `package`, imported at its first use; skip at once if it is missing."""
    need(name)
    return Lazy(lambda: package(name))


def triton_module(name: str) -> Any:
    """Return a `kernels_pallas` module that imports triton; without triton, tests that use it are skipped."""
    if lacking("torch", "triton"):
        return Lazy(lambda: need("torch", "triton"))
    return importlib.import_module(f"kernels_pallas.{name}")


def mark(*packages: str) -> pytest.MarkDecorator:
    """Return a mark for tests that need `packages`; in CI they always run."""
    why = lacking(*packages)
    return pytest.mark.skipif(why is not None and not in_ci(), reason=why or "installed")
