"""Sources of documents: a module in this package for each kind of file or dataset.

A source is a subclass of `Shard`, and its module is found because it is in this package: no list names it. Every shard
yields records, which a `Layout` turns into documents with a domain. `seqjax prepare` makes blocks of them;
`corpus=stream` tokenises them while they are read.

Raise `TornShardError` where a shard ends early or is damaged: `prepare` keeps the records before that point and counts
the fault. A shard that must not be read in part raises `UserError` instead.
"""

import abc
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from seqjax import store
from seqjax.data.layout import SLIMPAJAMA, Layout

CHUNK = 1 << 18


class TornShardError(Exception):
    """A shard whose data ends early or is damaged; the records before that point are valid."""


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
