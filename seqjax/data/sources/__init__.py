"""Document sources: one module in this package per file format or dataset kind.

A source is a `Shard` subclass. Putting its module into this package registers it. Every shard yields records, and a
`Layout` converts them to documents with a domain. `seqjax prepare` makes blocks from them; `corpus=stream` tokenises
them while reading.

Raise `TornShardError` where a shard ends early or is damaged: `prepare` keeps the earlier records and counts the fault.
Raise `UserError` for a shard that must not be read in part.

A few kilobytes of compressed zeros can unpack to gigabytes, so sources bound the data that they hold. The bounds are
`MOST_TEXT` bytes per document, and per file the larger of `MOST_UNPACKED` and `PACKED` times the file size.
"""

import abc
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fsspec.implementations.local import LocalFileSystem

from seqjax import store, terminal
from seqjax.data.layout import SLIMPAJAMA, Layout
from seqjax.errors import UserError

CHUNK = 1 << 18
MOST_TEXT = 128 << 20  # bytes per document, or per line with a document
# Unpacked bytes allowed for any file, and the compression ratio up to which larger files may exceed them.
MOST_UNPACKED, PACKED = 512 << 20, 100


class TornShardError(Exception):
    """A shard ends early or is damaged; the records before that point are valid."""


def too_long(where: str) -> UserError:
    """Return the error for a document that exceeds `MOST_TEXT`."""
    return UserError(
        f"{where} is longer than {terminal.size(MOST_TEXT)}, the limit for a document; split or remove it."
    )


def too_large(url: str) -> UserError:
    """Return the error for a file that unpacks to too much data."""
    return UserError(
        f"{url} unpacks to more than {terminal.size(MOST_UNPACKED)} and more than {PACKED} times its size; remove it, "
        "or, if it is text, store it without compression."
    )


def ignore(n_bytes: int) -> None:
    """Ignore the number of bytes read."""
    del n_bytes


@dataclasses.dataclass(frozen=True)
class Shard(abc.ABC):
    """One file: its URL, its name relative to the source, its split and size in bytes.

    One process creates a shard and another reads it, so subclasses must be picklable.

    Attributes:
        endings: The file name endings that this class reads; empty for a source that overrides `find`.
        is_whole: Whether a file is one document, without fields that could name its domain.
        layout: The default domain location in its records.
        package: The distribution that reads the files; all cluster workers must have the same version.
    """

    url: str
    name: str
    split: str
    size: int

    endings: ClassVar[tuple[str, ...]] = ()
    is_whole: ClassVar[bool] = False
    layout: ClassVar[Layout] = SLIMPAJAMA
    package: ClassVar[str] = ""

    def changed(self) -> float | None:
        """Return the file's last change in seconds since 1970, or None if unknown.

        Raises `UserError` if the file is missing.
        """
        fs, path = store.filesystem(self.url)
        try:
            if isinstance(fs, LocalFileSystem):
                status = Path(path).stat()
                return max(status.st_mtime, status.st_ctime)
            return fs.modified(path).timestamp()
        except FileNotFoundError:
            raise UserError(f"{self.url} was moved or deleted; put back a copy of it.") from None
        except Exception:  # Many stores lack this information, each with a different error.
            return None

    @abc.abstractmethod
    def records(
        self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore
    ) -> Iterator[bytes | dict[str, Any]]:
        """Yield the records in order: JSON lines, or rows with the fields of `layout`.

        `on_read` receives the number of bytes read from the file since its last call.
        """

    def content(self, on_read: Callable[[int], None]) -> Iterator[bytes]:
        """Yield the bytes of the file; raise `UserError` if its store fails."""
        with store.reading(self.url) as file:
            while chunk := file.read(CHUNK):
                on_read(len(chunk))
                yield chunk

    @classmethod  # noqa: B027 - most sources need no package
    def require(cls) -> None:
        """Raise `MissingPackageError` if the package for these files is missing."""

    @classmethod
    def find(cls, source: str) -> Sequence["Shard"]:
        """Return the shards of `source` if it is a dataset directory of this kind.

        The default is none, so files are found by their endings.
        """
        del source
        return ()


def kinds() -> list[type[Shard]]:
    """Return all sources: those in this package, and subclasses in the user program."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return Shard.__subclasses__()
