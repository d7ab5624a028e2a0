"""What the workers of a cluster run: jobs, after a look at whether this process has what they need.

A *marker*, a file beside the parts, says what that is. A process looks for it before its first job, so that one that
joins later does too.
"""

import importlib.metadata
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

import seqjax
from seqjax.data import shards
from seqjax.data.tokenizer import load_tokenizer
from seqjax.errors import UserError
from seqjax.files import read_json, write_json

SAMPLES = 5  # source files that a worker opens to see whether it can

# Packages that must be equal everywhere: the protocol depends on the first two, the bytes on the others.
_PACKAGES = ("dask", "distributed", "array_record")
_TOKENIZER_PACKAGES = {"mixtral": ("sentencepiece",), "huggingface": ("tokenizers",)}


class Needs(NamedTuple):
    """What the jobs need on every worker: the directory of the parts, the shards and the tokenizer with its hash."""

    parts: Path
    shards: Sequence[shards.Shard]
    tokenizer: str
    tokenizer_path: str
    tokenizer_sha256: str


def run_job(job: Any, *, function: Callable[[Any], None], marker: str) -> None:
    """Run a job in a worker; raise `UserError` if this process lacks what jobs need."""
    if fault := worker_fault(marker):
        raise UserError(fault)
    function(job)


_checked: set[str] = set()  # markers of the preparations that this process can work for


def worker_fault(marker: str) -> str:
    """Return why this process cannot do the jobs of the preparation with this marker, or nothing if it can."""
    if marker in _checked:
        return ""
    fault = _fault(Path(marker))
    if fault:
        return f"The worker process {os.getpid()} on {socket.gethostname()} {fault}"
    _checked.add(marker)
    return ""


def _fault(marker: Path) -> str:
    try:
        needs = read_json(marker)
    except OSError as error:
        return (
            f"does not see {marker.parent.parent} as it is here ({error.strerror}): give an --out on storage that all "
            "workers share, under the same path."
        )
    wanted = needs["versions"]
    found = _versions(wanted)
    other = [f"{name} {found[name]} (here {wanted[name]})" for name in wanted if found[name] != wanted[name]]
    if other:
        return f"has {', '.join(other)}: install the same versions, which alone give the same bytes."
    try:
        with tempfile.TemporaryFile(dir=marker.parent) as file:
            file.write(b"seqjax")
    except OSError as error:
        return f"cannot write to {marker.parent.parent} ({error.strerror}); change its permissions."
    for url, size in needs["sources"]:
        if fault := _source_fault(url, size):
            return f"{fault}: give a --source that all workers share, under the same path."
    try:
        tokenizer = load_tokenizer(needs["tokenizer"], needs["tokenizer_path"])
    except UserError as error:
        return f"cannot load the tokenizer: {error}"
    if tokenizer.hash != needs["tokenizer_sha256"]:
        return f"has another tokenizer of this name ({tokenizer.hash[:12]}, here {needs['tokenizer_sha256'][:12]})."
    return ""


def _source_fault(url: str, size: int) -> str:
    try:
        fs, path = fsspec.core.url_to_fs(url)
        found = fs.info(path)["size"]
        with fs.open(path, "rb") as file:
            file.read(1)
    except Exception as error:  # Every file system has its own.
        return f"cannot read {url} ({type(error).__name__}: {error})"
    return "" if found == size else f"sees {found} bytes in {url}, where this machine sees {size}"


def write_marker(path: Path, needs: Needs) -> None:
    """Write a marker for `worker_fault`."""
    step = max(1, len(needs.shards) // SAMPLES)
    packages = (*_PACKAGES, *_TOKENIZER_PACKAGES.get(needs.tokenizer, ()))
    packages = (*packages, *sorted({shard.package for shard in needs.shards if shard.package}))
    marker = {
        "versions": _versions(("python", "seqjax", *packages)),
        "sources": [(shard.url, shard.size) for shard in needs.shards[::step]],
        "tokenizer": needs.tokenizer,
        "tokenizer_path": needs.tokenizer_path,
        "tokenizer_sha256": needs.tokenizer_sha256,
    }
    write_json(path, marker)


def _versions(names: Iterable[str]) -> dict[str, str]:
    known = {"python": ".".join(platform.python_version_tuple()[:2]), "seqjax": seqjax.__version__}
    return {name: known[name] if name in known else installed(name) for name in names}


def installed(package: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
