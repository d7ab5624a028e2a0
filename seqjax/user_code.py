"""Run a user's Python file: a config, a study or a mixer.

The file need not be importable by name. An error in it becomes a `UserError` with the line number. `source_of` returns
the file that defines a class, with the content that Python ran; a run keeps a copy of it.
"""

import contextlib
import hashlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from seqjax.errors import UserError
from seqjax.reading import content


class Source(NamedTuple):
    """A Python file's absolute path and the content that was run."""

    path: Path
    content: bytes

    @property
    def sha256(self) -> str:
        """The hash of the content."""
        return hashlib.sha256(self.content).hexdigest()


_sources: dict[str, Source] = {}  # module name -> file, for modules created by `run`


def read(path: str | Path) -> Source:
    """Return the file at `path`; raise `UserError` if it cannot be read."""
    path = Path(path).resolve()
    return Source(path, content(path, fix="give the path of a Python file"))


def run(source: Source, name: str) -> ModuleType:
    """Run a file as the module `name` and return it.

    Raises `UserError` for an error in the file.
    """
    module = ModuleType(name)
    module.__file__ = str(source.path)
    # Dataclasses, pickle and inspect find a class by the name of its module.
    sys.modules[name], _sources[name] = module, source
    try:
        with naming_the_line(source.path):
            exec(compile(source.content, module.__file__, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def is_of(module: ModuleType, source: Source) -> bool:
    """Return whether `run` created the module from this file with this content."""
    return sys.modules.get(module.__name__) is module and _sources.get(module.__name__) == source


def has_run(cls: type) -> bool:
    """Return whether a class comes from a file that `run` has run."""
    return cls.__module__ in _sources


def source_of(cls: type) -> Source | None:
    """Return the file that defines a class.

    Returns None for a class from a notebook, a script or a function body.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__ or not str(file).endswith(".py"):
        return None
    source = _sources.get(cls.__module__) or read(str(file))
    # A class created by `type(...)` has its caller's module.
    return source if f"class {cls.__name__}".encode() in source.content else None


@contextlib.contextmanager
def naming_the_line(path: Path) -> Iterator[None]:
    """Turn an error in the user's file at `path` into a `UserError` with its line."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        raise UserError(f"{error.filename or path}, line {error.lineno}: {error.msg}. Correct the file.") from error
    except BaseException as error:  # `sys.exit(0)` would look like a success
        names = (str(path), str(path.resolve()))
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in names]
        where = f"{path}, line {lines[-1]}" if lines else f"{path}"
        raise UserError(f"{where}: {type(error).__name__}: {error}. Correct the file.") from error
