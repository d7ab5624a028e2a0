"""Packages that only some tests need, each with the extra of pyproject.toml that brings it.

Without its packages a test is skipped, and the reason names the extra. In CI, which installs the extra `test-all`, it
fails instead, so that nothing is left out there without a word.
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
    """Return whether this is CI, as the hosts of CI say it: `CI=true`."""
    return os.environ.get("CI", "").lower() in ("1", "true")


def lacking(*packages: str) -> str | None:
    """Return what to install for `packages`, without importing them, or None where all of them are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    extras = ",".join(sorted({EXTRA_OF[name] for name in packages if name in missing}))
    return f"needs {', '.join(missing)}: pip install -e '.[{extras}]'" if missing else None


def need(*packages: str) -> None:
    """Skip the test, or the module that is being collected, where one of `packages` is missing; fail it in CI."""
    __tracebackhide__ = True
    why = lacking(*packages)
    if why and in_ci():
        pytest.fail(f"{why}; CI has every extra of the tests", pytrace=False)
    if why:
        pytest.skip(why, allow_module_level=True)


def package(name: str) -> Any:
    """Return the imported package, as `need` has it; warnings that its import raises are its own affair."""
    need(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


class Lazy:
    """A module that is imported at its first use: workers collect every file, and run some of them."""

    def __init__(self, load: Callable[[], Any]):
        self._load = load

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("__", "_pytest", "pytest")):  # pytest asks every global of a test file
            raise AttributeError(attribute)
        return getattr(self._load(), attribute)


def lazy(name: str) -> Any:
    """Return the package as `package` does, imported when it is first used; skip at once where it is missing."""
    need(name)
    return Lazy(lambda: package(name))


def triton_module(name: str) -> Any:
    """Return a module of `kernels_pallas` that imports triton; without triton, a test that uses it is skipped."""
    if lacking("torch", "triton"):
        return Lazy(lambda: need("torch", "triton"))
    return importlib.import_module(f"kernels_pallas.{name}")


def mark(*packages: str) -> pytest.MarkDecorator:
    """Return the mark of tests that need `packages`; in CI they run, and fail, whatever is missing."""
    why = lacking(*packages)
    return pytest.mark.skipif(why is not None and not in_ci(), reason=why or "installed")
