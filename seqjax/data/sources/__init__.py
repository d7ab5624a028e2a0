"""Sources of documents: a module in this package for each kind of file or dataset.

A source is a subclass of `Shard`, and its module is found because it is in this package: no list names it. Every shard
yields records, which a `Layout` turns into documents with a domain. `seqjax prepare` makes blocks of them;
`corpus=stream` tokenises them while they are read.

Raise `TornShardError` where a shard ends early or is damaged: `prepare` keeps the records before that point and counts
the fault. A shard that must not be read in part raises `UserError` instead.

A few kilobytes of compressed zeros unpack to gigabytes, so sources bound what they hold of a file: `MOST_TEXT` bytes of
a document, and `MOST_UNPACKED` of a file unless its own size is a share of them.
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
MOST_TEXT = 128 << 20  # bytes of a document, or of the line that holds it
# Bytes of the text of a file, for a file of any size; more if they are not packed much smaller than they are.
MOST_UNPACKED, PACKED = 512 << 20, 100


class TornShardError(Exception):
    """A shard whose data ends early or is damaged; the records before that point are valid."""


def too_long(where: str) -> UserError:
    """Return the error for a document that is too long."""
    return UserError(
        f"{where} has more than {terminal.size(MOST_TEXT)}, the most that a document can have; split or remove it."
    )


def too_large(url: str) -> UserError:
    """Return the error for a file that unpacks to too much."""
    return UserError(
        f"{url} unpacks to more than {terminal.size(MOST_UNPACKED)} and more than {PACKED} times its size; remove it, "
        "or, if it is text, store it without compression."
    )


def ignore(n_bytes: int) -> None:
    """Do nothing with the number of bytes read."""
    del n_bytes


@dataclasses.dataclass(frozen=True)
class Shard(abc.ABC):
    """One file: its URL, its name relative to the source, its split and its size in bytes.

    A shard is created in one process and read in another, so subclasses can be pickled.

    Attributes:
        endings: The ends of the names of the files that this class reads; none for a source with a `find` of its own.
        is_whole: Whether a file is one document, without fields that could name its domain.
        layout: The default location of the records' domains.
        package: The distribution that reads the files; all workers of a cluster must have the same version of it.
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
        """Return when the file was last changed, in seconds since 1970, or None if its store does not say."""
        fs, path = store.filesystem(self.url)
        try:
            if isinstance(fs, LocalFileSystem):
                found = Path(path).stat()
                return max(found.st_mtime, found.st_ctime)
            return fs.modified(path).timestamp()
        except FileNotFoundError:
            raise UserError(f"{self.url} is missing: it was moved or deleted; put back a copy of it.") from None
        except Exception:  # Many stores cannot say it, each with an error of its own.
            return None

    @abc.abstractmethod
    def records(
        self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore
    ) -> Iterator[bytes | dict[str, Any]]:
        """Yield the records in order, each a line of JSON or a row with at least the fields that `layout` names.

        `on_read` is called with the number of bytes read from the file since the last call.
        """

    def content(self, on_read: Callable[[int], None]) -> Iterator[bytes]:
        """Yield the bytes of the file; raise `UserError` if the store that it is in fails."""
        with store.reading(self.url) as file:
            while chunk := file.read(CHUNK):
                on_read(len(chunk))
                yield chunk

    @classmethod  # noqa: B027 - most sources need no package
    def require(cls) -> None:
        """Raise `MissingPackageError` if the package that reads these files is not installed."""

    @classmethod
    def find(cls, source: str) -> Sequence["Shard"]:
        """Return the shards of a directory that is a dataset of this kind; none, so files are found by their names."""
        del source
        return ()


def kinds() -> list[type[Shard]]:
    """Return the sources of all modules in this package, and those that the program defines itself."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return Shard.__subclasses__()
