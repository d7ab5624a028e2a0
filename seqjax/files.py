"""Atomic file writes: a file is written beside its destination, synced and renamed, so it is never left incomplete."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from seqjax.errors import UserError


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A context that opens a new binary file, which replaces `path` if the context ends without an error."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: str | Path, value: Any, *, sort_keys: bool = False) -> None:
    """Write `value` as indented JSON, atomically."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2, sort_keys=sort_keys) + "\n").encode())


def read_json(path: str | Path) -> dict[str, Any]:
    """Return what `write_json` wrote; raise `UserError` if the file is not JSON."""
    try:
        return json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); restore it, or make it again elsewhere.") from error
