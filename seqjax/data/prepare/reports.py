"""The report that a finished job leaves for the command, and the error of a job that could not write."""

import errno
import json
from pathlib import Path
from typing import Any

from seqjax.errors import UserError


def read_report(path: Path) -> dict[str, Any] | None:
    """Return the report of a finished job, or None if it has not finished."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the error to raise when a part or a file of blocks could not be written."""
    why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return UserError(
        f"Cannot write {path}: {why}. Finished shards are kept: make room (or move the directory) and run "
        "the same command again."
    )
