"""Make it an error if library tests open files in lab or in the recorded benchmarks.

Python calls an audit hook whenever this process opens a file, from any library. A hook cannot be removed, so it is
added only if pytest's arguments name no lab test.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
APART = tuple(f"{ROOT / name}{os.sep}" for name in ("lab", "benchmarks/results"))


class OpenedFileOfLabError(Exception):
    """A test outside lab/tests opened a file in lab or in benchmarks/results."""


def enforce(arguments: Sequence[str]) -> None:
    """Add the hook, unless one of pytest's `arguments` is in the lab."""
    if not any(Path(argument).absolute().is_relative_to(ROOT / "lab") for argument in arguments):
        sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes) and is_apart(os.fsdecode(arguments[0])):
        raise OpenedFileOfLabError(f"{arguments[0]!r}: put this test in lab/tests, or read a file of tests/golden.")


def is_apart(path: str) -> bool:
    """Return whether a path is in a forbidden directory."""
    return os.path.abspath(path).startswith(APART)  # noqa: PTH100 - called at every opening: without links
