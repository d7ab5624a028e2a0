"""Atomic files, checksums, temporary files and the cache directory.

A file is written under a temporary name, synced and renamed, so it is never incomplete. `measure` detects later
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

# Values of `OSError.errno` when a disk cannot be written any more.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def find_in_current_directory() -> None:
    """Make modules in the current directory importable, after installed modules.

    This is done only for a user's mixer or config. The current directory may belong to a stranger, and its modules may
    shadow packages that are not installed.
    """
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)


def is_text(text: str) -> bool:
    """Return whether an argument can be encoded as UTF-8.

    Bytes that the locale does not know are lone surrogates and cannot be encoded.
    """
    try:
        return bool(text.encode()) or not text
    except UnicodeEncodeError:
        return False


READ_BYTES = 1 << 22


def cache_directory(setting: str = "") -> Path:
    """Return the directory for files that seqjax can create or fetch again.

    This is `setting`, the value of a setting, or else `seqjax` in XDG_CACHE_HOME or in `~/.cache`.
    """
    if setting:
        return Path(setting).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "seqjax"


def temporary_beside(path: Path) -> Path:
    """Return a new temporary name in the directory of `path`, unique across machines."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


TEMPORARY = re.compile(r"\..+\.([0-9a-f]{32}|\d+)\.tmp")


def remove_temporaries(directory: Path, *, below: bool = True) -> None:
    """Remove temporary files that a killed process left in `directory`.

    With `below`, subdirectories are included. Only this user's files with a name from `temporary_beside`, or its
    earlier versions, are removed.
    """
    for leftover in directory.rglob(".*.tmp") if below else directory.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it
            status = leftover.lstat()
            is_own = status.st_uid == os.getuid() if hasattr(os, "getuid") else True
            if TEMPORARY.fullmatch(leftover.name) and stat.S_ISREG(status.st_mode) and is_own:
                leftover.unlink()


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Return a context with a new binary file that replaces `path` at the end.

    After an error, such as a full disk, `path` keeps its content and the new file is removed.
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
    """Return the bytes that `write_json` writes."""
    return (json.dumps(value, indent=2, sort_keys=sort_keys) + "\n").encode()


def measure(path: str | Path | epath.Path) -> tuple[int, int]:
    """Return a file's length in bytes and its CRC-32."""
    size = crc = 0
    with (Path(path) if isinstance(path, str) else path).open("rb") as file:
        while chunk := file.read(READ_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc
