"""Atomic file writes: a file is written beside its destination, synced and renamed, so it is never left incomplete.

`measure` tells later whether a file is still the one that was written.
"""

import contextlib
import json
import os
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from etils import epath

from seqjax.errors import UserError

READ_BYTES = 1 << 22


def cache_directory(given: str = "") -> Path:
    """Return where seqjax keeps what it can make or fetch again.

    That is the directory `given` in a setting, or `~/.cache/seqjax`, or the latter in XDG_CACHE_HOME.
    """
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "seqjax"


def temporary_beside(path: Path) -> Path:
    """Return the name of a new temporary file beside `path`, which no other process, on any machine, takes as well."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A context that opens a new binary file, which replaces `path` if the context ends without an error."""
    path = Path(path)
    temporary = temporary_beside(path)
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: str | Path, value: Any, *, sort_keys: bool = False) -> None:
    """Write `value` as indented JSON, atomically."""
    with replacing(path) as file:
        file.write(as_json(value, sort_keys=sort_keys))


def as_json(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return the content of a file that `write_json` writes."""
    return (json.dumps(value, indent=2, sort_keys=sort_keys) + "\n").encode()


def read_json(path: str | Path) -> dict[str, Any]:
    """Return what `write_json` wrote; raise `UserError` if the file is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); restore it, or make it again elsewhere.") from error


def measure(path: str | Path | epath.Path) -> tuple[int, int]:
    """Return the length in bytes and the CRC-32 of a file."""
    size = crc = 0
    with (Path(path) if isinstance(path, str) else path).open("rb") as file:
        while chunk := file.read(READ_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc
