"""Atomic files, checksums, temporary files and the cache directory.

A file is written under a temporary name, synced and renamed, so it is never left incomplete. `measure` detects later
changes.
"""

import contextlib
import errno
import json
import os
import re
import stat
import sys
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from etils import epath

# The values of `OSError.errno` when a disk cannot be written any more.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def find_in_current_directory() -> None:
    """Let Python find modules in the current directory, after installed ones, for a mixer or config of the user.

    Nothing else looks there: it may be a stranger's directory, with modules named like packages that are not installed.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def is_text(text: str) -> bool:
    """Return whether an argument can be written as UTF-8: bytes that the locale does not know are halves of pairs."""
    try:
        return bool(text.encode()) or not text
    except UnicodeEncodeError:
        return False


READ_BYTES = 1 << 22


def cache_directory(given: str = "") -> Path:
    """Return the directory for files that seqjax can make or fetch again.

    This is `given`, the value of a setting, or else `seqjax` in XDG_CACHE_HOME or in `~/.cache`.
    """
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "seqjax"


def temporary_beside(path: Path) -> Path:
    """Return the name of a new temporary file beside `path`, unique among processes on all machines."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


TEMPORARY = re.compile(r"\..+\.([0-9a-f]{32}|\d+)\.tmp")


def remove_temporaries(directory: Path, *, below: bool = True) -> None:
    """Remove the temporary files in and `below` a directory that a process left when it was killed.

    These are files of this user with a name that `temporary_beside` makes, or earlier versions made.
    """
    for leftover in directory.rglob(".*.tmp") if below else directory.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            found = leftover.lstat()
            is_own = found.st_uid == os.getuid() if hasattr(os, "getuid") else True
            if TEMPORARY.fullmatch(leftover.name) and stat.S_ISREG(found.st_mode) and is_own:
                leftover.unlink()


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Return a context that opens a new binary file, which replaces `path` if the context ends without an error.

    After an error, of a full disk for instance, nothing of the new file is left.
    """
    path = Path(path)
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: str | Path, value: Any, *, sort_keys: bool = False) -> None:
    """Write `value` as indented JSON, atomically."""
    with replacing(path) as file:
        file.write(as_json(value, sort_keys=sort_keys))


def as_json(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return `value` as the text that `write_json` writes."""
    return (json.dumps(value, indent=2, sort_keys=sort_keys) + "\n").encode()


def measure(path: str | Path | epath.Path) -> tuple[int, int]:
    """Return the length in bytes and the CRC-32 of a file."""
    size = crc = 0
    with (Path(path) if isinstance(path, str) else path).open("rb") as file:
        while chunk := file.read(READ_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc
