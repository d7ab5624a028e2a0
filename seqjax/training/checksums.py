"""Checksums that detect damaged checkpoints.

Orbax's array files have no value checksums, and a directory that lost an item still loads. `_CHECKPOINT_METADATA`
therefore lists the items, and `checksums.json` holds the length and CRC-32 for each item file.
"""

import concurrent.futures
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath

from seqjax.errors import UserError
from seqjax.files import measure, write_json
from seqjax.reading import parse_json

CHECKSUMS = "checksums.json"
CHECKSUMMED = {"checksums": "crc32"}  # entry in METADATA if the checkpoint has CHECKSUMS
METADATA = "_CHECKPOINT_METADATA"  # Orbax's file; not in CHECKSUMS, because the rename writes it again
PARAMS = ("params",)
THREADS = 4


class DamagedError(Exception):
    """A checkpoint is damaged; the message gives the file and the damage."""


def write_checksums(directory: Path) -> None:
    """Write `checksums.json` into a checkpoint directory before its rename."""
    paths = [path for item in directory.iterdir() if item.is_dir() for path in _files(item)]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        lengths_and_crcs = pool.map(measure, paths)
        sums = {
            path.relative_to(directory).as_posix(): list(pair)
            for path, pair in zip(paths, lengths_and_crcs, strict=True)
        }
    write_json(directory / CHECKSUMS, {"crc32": sums}, sort_keys=True)


def check(
    directory: Path | epath.Path,
    names: Sequence[str],
    *,
    identity: str | None = None,
    part: int = 0,
    parts: int = 1,
) -> None:
    """Raise `DamagedError` unless the items `names` exist, with unchanged files.

    A checkpoint with another `identity` is refused, unless it has only parameters or `identity` is None. Several
    processes can share the work: this call reads part `part` of `parts`.
    """
    metadata = read_metadata(directory)
    is_resumable = tuple(metadata["item_handlers"]) != PARAMS
    if identity is not None and is_resumable and metadata["custom_metadata"].get("identity", "") != identity:
        raise DamagedError("another run wrote it: its identity is not the one in run.json")
    for name in names:
        if name not in metadata["item_handlers"]:
            raise DamagedError(f"it was written without the item {name!r}")
        if not (directory / name).is_dir():
            raise DamagedError(f"the item {name!r} is missing")
    if "checksums" not in metadata["custom_metadata"] and not (directory / CHECKSUMS).exists():
        return
    sums = read_object(directory / CHECKSUMS, {"crc32": {str: [int]}})["crc32"]
    files = sorted((path, *sums[path]) for path in sums if path.partition("/")[0] in names)
    present = {path.relative_to(directory).as_posix() for name in names for path in _files(directory / name)}
    if unknown := present - {path for path, *_ in files}:
        raise DamagedError(f"{CHECKSUMS} does not name {min(unknown)}")
    if any(len(file) != 3 for file in files):
        raise DamagedError(f"{CHECKSUMS} is damaged (a file has one length and one checksum)")
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for fault in pool.map(lambda file: _fault(directory, *file), files[part::parts]):
            if fault:
                raise DamagedError(fault)


def _files(item: Path | epath.Path) -> list[Path]:
    try:
        return [path for path in Path(item).rglob("*") if path.is_file()]
    except FileNotFoundError as error:  # another run removes the checkpoint
        raise DamagedError(f"{error.filename} is missing") from None


def is_intact(directory: Path | epath.Path, names: Sequence[str], identity: str | None) -> bool:
    """Return whether `check` accepts a checkpoint."""
    try:
        check(directory, names, identity=identity)
    except DamagedError:
        return False
    return True


def _fault(directory: Path | epath.Path, path: str, size: int, crc: int) -> str:
    """Return a description of a file's damage, or ""."""
    if not path.isprintable() or {"", ".", ".."} & {*path.split("/")}:
        return f"{CHECKSUMS} names {path!r}, which is no file of the checkpoint"
    try:
        actual_size, actual_crc = measure(directory / path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if actual_size != size:
        return f"{path} has {actual_size} bytes, {size} were written"
    return "" if actual_crc == crc else f"{path} was changed: its checksum differs"


def read_metadata(directory: Path | epath.Path) -> dict[str, Any]:
    """Return a checkpoint's metadata; raise `DamagedError` if it is missing."""
    metadata = read_object(directory / METADATA, {"item_handlers": dict, "custom_metadata": (dict, None)})
    return {"item_handlers": metadata["item_handlers"], "custom_metadata": metadata["custom_metadata"] or {}}


def read_object(path: Path | epath.Path, form: Any) -> dict[str, Any]:
    """Return the JSON object in a checkpoint file.

    Raises `DamagedError` if the file is missing or has another form.
    """
    try:
        return parse_json(path.read_bytes(), form, path.name, fix="")
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except (OSError, UserError) as error:
        raise DamagedError(f"{path.name} is damaged ({error})") from None
