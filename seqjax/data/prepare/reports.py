"""What a finished job leaves for the command to read, and the error of one that could not write."""

import errno
import json
from pathlib import Path
from typing import Any

from seqjax.errors import UserError


def read_report(path: Path) -> dict[str, Any] | None:
    """The report of a finished job, None if it is not finished."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def cannot_write(path: Path, error: OSError) -> UserError:
    """The error to raise where a part or a file of blocks could not be written."""
    why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return UserError(
        f"Cannot write {path}: {why}. Finished shards are kept: make room (or move the directory) and run "
        "the same command again."
    )
