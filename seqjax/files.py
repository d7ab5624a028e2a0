"""Files that a killed process leaves old or new, never torn: written beside their place, synced, then renamed."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from seqjax.errors import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any, *, sort_keys: bool = False) -> None:
    """Write `value` as indented JSON."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2, sort_keys=sort_keys) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote; raises `UserError` where it is no JSON."""
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); restore it, or make it again elsewhere.") from error
