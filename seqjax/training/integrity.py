"""Whether a checkpoint is still what was written: which items it has, and a checksum of every file.

Orbax's array files have no checksum of their values, and a directory that lost an item still loads as one without it.
So a checkpoint names its items in `_CHECKPOINT_METADATA`, and `checksums.json`, written before the checkpoint is
renamed into place, holds the length and CRC-32 of every other file. Checkpoints of older versions have neither the
file nor the entry `CUSTOM`; their items are checked, their bytes are not.
"""

import concurrent.futures
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from seqjax.files import measure, write_json

FILE = "checksums.json"
METADATA = "_CHECKPOINT_METADATA"  # Orbax's; it is written once more when the checkpoint is renamed
CUSTOM = {"checksums": "crc32"}  # in that file, of a checkpoint that has `checksums.json`
PARAMS = ("params",)
STATE = ("data", "meta", "params", "rest")
THREADS = 4


class DamagedError(Exception):
    """A checkpoint is not what was written; the message says what is wrong with which file."""


def write(directory: Path) -> None:
    """Write `checksums.json` for the items in the directory of a checkpoint that is not yet renamed into place."""
    paths = [path for item in directory.iterdir() if item.is_dir() for path in item.rglob("*") if path.is_file()]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(measure, paths)
        sums = {path.relative_to(directory).as_posix(): list(pair) for path, pair in zip(paths, found, strict=True)}
    write_json(directory / FILE, {"crc32": sums}, sort_keys=True)


def items(directory: Path | epath.Path) -> tuple[str, ...]:
    """Return the names of the items that a checkpoint was written with; raise `DamagedError` if it does not say."""
    return tuple(sorted(_metadata(directory)["item_handlers"]))


def check(directory: Path | epath.Path, names: Sequence[str], *, part: int = 0, parts: int = 1) -> None:
    """Raise `DamagedError` unless the items `names` of a checkpoint are there and their files are those written.

    Of the files, `part` of `parts` is read, so that several processes can share the work.
    """
    recorded = items(directory)
    for name in names:
        if name not in recorded:
            raise DamagedError(f"it was written without the item {name!r}")
        if not (directory / name).is_dir():
            raise DamagedError(f"the item {name!r} is missing")
    if "checksums" not in _metadata(directory)["custom_metadata"] and not (directory / FILE).exists():
        return
    try:
        sums = json.loads((directory / FILE).read_bytes())["crc32"]
        files = sorted((path, *map(int, sums[path])) for path in sums if path.partition("/")[0] in names)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{FILE} is missing or damaged ({error})") from None
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for fault in pool.map(lambda file: _fault(directory, *file), files[part::parts]):
            if fault:
                raise DamagedError(fault)


def is_whole(directory: Path | epath.Path, names: Collection[str]) -> bool:
    """Return whether `check` finds nothing wrong."""
    try:
        check(directory, sorted(names))
    except DamagedError:
        return False
    return True


def _fault(directory: Path | epath.Path, path: str, size: int, crc: int) -> str:
    """Return what is wrong with a file, or ""."""
    try:
        found, found_crc = measure(directory / path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if found != size:
        return f"{path} has {found} bytes, {size} were written"
    return "" if found_crc == crc else f"{path} was changed: its checksum is not the one that was written"


def _metadata(directory: Path | epath.Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / METADATA).read_bytes())
        return {"item_handlers": dict(found["item_handlers"]), "custom_metadata": dict(found["custom_metadata"] or {})}
    except FileNotFoundError:
        raise DamagedError(f"{METADATA} is missing") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{METADATA} is damaged ({error})") from None
