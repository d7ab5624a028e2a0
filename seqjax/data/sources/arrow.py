"""Read Arrow files, as written by Hugging Face datasets' `save_to_disk`.

pyarrow (the extra `parquet`) reads them. A file is a message sequence: the schema, then dictionaries and record
batches, with optionally compressed buffers. https://arrow.apache.org/docs/format/Columnar.html describes their
metadata, a FlatBuffers table. Each compressed buffer starts with its unpacked size. pyarrow allocates that size and
checks no offsets inside a buffer, so this module checks the size and the offsets.
"""

import io
import struct
from collections.abc import Callable, Iterator
from typing import Any

from seqjax import store
from seqjax.data import sources
from seqjax.data.layout import SLIMPAJAMA, Layout
from seqjax.data.sources import Shard, TornShardError, ignore
from seqjax.data.sources.parquet import Parquet, columns_of, rows_of
from seqjax.errors import UserError, first_line

DICTIONARY, RECORDS = 2, 3  # the message kinds with buffers


class Arrow(Shard):
    """A file in the Arrow streaming format; its records are the table rows.

    Each split has a folder with its name.
    """

    endings = (".arrow",)
    package = "pyarrow"

    def records(
        self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows.

        Raises `TornShardError` after the last readable row of a damaged file.
        """
        self.require()
        import pyarrow.ipc  # pyright: ignore[reportMissingImports]

        reported = 0
        with store.reading(self.url) as file:
            try:
                table = pyarrow.ipc.open_stream(_Messages(pyarrow.ipc.MessageReader.open_stream(file), self.url))
                names = table.schema.names
                # For the field `meta.source`, read the whole column `meta`.
                heads = {head for name in columns_of(layout, names) or names for head in (name, name.partition(".")[0])}
                for batch in table:
                    used = batch.select([i for i, name in enumerate(names) if name in heads])
                    used.validate(full=True)
                    yield from rows_of(used)
                    now = file.tell()
                    on_read(now - reported)
                    reported = now
            except UserError:
                raise
            except Exception as error:  # Damaged bytes raise nearly any error, even a MemoryError.
                raise TornShardError(f"damaged Arrow data ({first_line(error)})") from None

    @classmethod
    def require(cls) -> None:
        """Raise `MissingPackageError` if pyarrow is not installed."""
        Parquet.require()


class _Messages(io.RawIOBase):
    """A file object over a file's messages.

    Reading raises `UserError` for a message that would unpack to too much data.
    """

    def __init__(self, messages: Any, url: str):
        super().__init__()
        self._messages, self._url = messages, url
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True, as pyarrow requires."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes or fewer, and none only at the end."""
        if not self._rest:
            try:
                message = self._messages.read_next_message()
            except StopIteration:
                return b""
            body = memoryview(message.body or b"")
            unpacked = _unpacked(memoryview(message.metadata), body)
            if unpacked > max(sources.MOST_UNPACKED, sources.PACKED * len(body)):
                raise sources.too_large(self._url)
            self._rest = memoryview(message.serialize())
        chunk, self._rest = self._rest[:size], self._rest[size:]
        return chunk.tobytes()


def _unpacked(metadata: memoryview, body: memoryview) -> int:
    """Return the unpacked size of a message's compressed buffers, or 0 if none.

    Field numbers follow Arrow's Message.fbs, where a Buffer struct is an offset and a length.
    """
    message = _Table(metadata, struct.unpack_from("<I", metadata)[0])
    kind = metadata[message.place(1)] if message.place(1) else 0
    if kind not in (DICTIONARY, RECORDS):
        return 0
    batch = message.table(2)
    if kind == DICTIONARY:
        batch = batch.table(1)
    if not batch.place(3):  # the compression
        return 0
    first, total = batch.target(2), 0
    for i in range(struct.unpack_from("<I", metadata, first)[0]):
        offset, length = struct.unpack_from("<qq", metadata, first + 4 + 16 * i)
        if length > 0:
            total += max(length, struct.unpack_from("<q", body, offset)[0])  # -1 marks an uncompressed buffer
    return total


class _Table:
    """A FlatBuffers table; the offsets in its vtable locate the fields."""

    def __init__(self, data: memoryview, at: int):
        self._data, self._at = data, at
        self._offsets = at - struct.unpack_from("<i", data, at)[0]
        self._n_fields = struct.unpack_from("<H", data, self._offsets)[0] // 2 - 2

    def place(self, field: int) -> int:
        """Return a field's position, or 0 if it is absent."""
        if field >= self._n_fields:
            return 0
        offset = struct.unpack_from("<H", self._data, self._offsets + 4 + 2 * field)[0]
        return self._at + offset if offset else 0

    def target(self, field: int) -> int:
        """Return the position that a field points to.

        Raises `struct.error` if the field is absent.
        """
        if not (at := self.place(field)):
            raise struct.error(f"a message lacks field {field}")
        return at + struct.unpack_from("<I", self._data, at)[0]

    def table(self, field: int) -> "_Table":
        """Return the table that a field points to."""
        return _Table(self._data, self.target(field))
