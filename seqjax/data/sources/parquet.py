"""Read parquet files with pyarrow (the extra `parquet`), one document per row."""

import io
from collections.abc import Callable, Collection, Iterator
from typing import Any, BinaryIO

from seqjax import store
from seqjax.data import sources
from seqjax.data.layout import SET_NAME_FIELD, SLIMPAJAMA, SOURCE_FIELD, URL_FIELDS, Layout
from seqjax.data.sources import Shard, TornShardError, ignore
from seqjax.errors import MissingPackageError, UserError, first_line

BATCH_ROWS = 256
BATCH_BYTES = 256 << 20  # upper bound for rows read together


class Parquet(Shard):
    """A parquet file; its records are rows with the layout's and source columns."""

    endings = (".parquet",)
    package = "pyarrow"

    def records(
        self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows.

        If the file lacks a layout field, its rows have all columns, so an error can list them. Raises `TornShardError`
        after the last readable row of a damaged file.
        """
        self.require()
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]

        with store.reading(self.url) as file:
            try:
                table = pyarrow.parquet.ParquetFile(file)
                rows = _batch_rows(table.metadata, self.url, size=self.size)
                table = pyarrow.parquet.ParquetFile(_Pages(file, table.metadata), metadata=table.metadata)
                chosen, reported, done = columns_of(layout, table.schema_arrow.names), 0, 0
                for batch in table.iter_batches(batch_size=rows, columns=chosen):
                    yield from rows_of(batch)
                    done += batch.num_rows
                    now = self.size * done // max(1, table.metadata.num_rows)
                    on_read(now - reported)
                    reported = now
            except UserError:
                raise
            except Exception as error:  # Damaged bytes raise nearly any error, even a MemoryError.
                raise TornShardError(f"damaged parquet data ({first_line(error)})") from None

    @classmethod
    def require(cls) -> None:
        """Raise `MissingPackageError` if pyarrow is not installed."""
        try:
            import pyarrow.parquet  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingPackageError(
                "Parquet and Arrow files need pyarrow: install it with `pip install 'seqjax[parquet]'`."
            ) from None


def columns_of(layout: Layout, names: Collection[str]) -> list[str] | None:
    """Return the columns to read; None (all) if a layout field is missing.

    `names` are the file's columns.
    """
    fields = [layout.text_field]
    if not layout.reads_whole_files:
        fields.append(layout.domain_field or SET_NAME_FIELD)
    # `meta.source` is a column with that name, or the field `source` in the column `meta`.
    columns = {field if field in names else field.partition(".")[0] for field in fields}
    if not columns <= set(names):
        return None
    # Column names that the file lacks select nothing.
    return sorted(columns | {f for f in (SOURCE_FIELD, *URL_FIELDS) if f.partition(".")[0] not in columns})


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch one at a time.

    A value that is stored once may occur in every row, so the rows are not converted together.
    """
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for i in range(batch.num_rows):
        yield {name: _value(column[i]) for name, column in columns.items()}


def _value(scalar: Any) -> Any:
    """Return a scalar's Python value; None if Python cannot represent it.

    An example is a date after the year 9999.
    """
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", "surrogateescape")  # `Layout.document` refuses this text
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _chunks(metadata: Any) -> Iterator[Any]:
    """Yield the metadata of every column in every row group."""
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        yield from map(group.column, range(metadata.num_columns))


def _batch_rows(metadata: Any, url: str, *, size: int) -> int:
    """Return how many rows to read together.

    A value may be stored once for all its rows, so each row may be as long as its column. Raises `UserError` if a
    column would unpack to too much data for the file size.
    """
    longest = 1
    for column in _chunks(metadata):
        unpacked, packed = column.total_uncompressed_size, min(column.total_compressed_size, size)
        if unpacked > max(sources.MOST_UNPACKED, sources.PACKED * packed):
            raise sources.too_large(url)
        longest = max(longest, unpacked)
    return min(BATCH_ROWS, max(1, BATCH_BYTES // longest))


class _Pages(io.RawIOBase):
    """A parquet file that checks its page headers against the column metadata.

    pyarrow reads all pages of a column chunk at once and unpacks at most the sizes in their headers. `_batch_rows`
    relies on the metadata, so a read raises `ValueError` if the headers declare more.
    """

    def __init__(self, file: BinaryIO, metadata: Any):
        super().__init__()
        self._file = file
        self._sizes: dict[int, tuple[int, int]] = {}  # by offset: packed, unpacked
        for column in _chunks(metadata):
            starts = (column.dictionary_page_offset, column.data_page_offset)
            sizes = (column.total_compressed_size, column.total_uncompressed_size)
            self._sizes[min(filter(None, starts), default=0)] = sizes

    def readable(self) -> bool:
        """Return True, as pyarrow requires."""
        return True

    def seekable(self) -> bool:
        """Return True, as pyarrow requires."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to an offset."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the offset."""
        return self._file.tell()

    def read(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes."""
        at = self._file.tell()
        data = self._file.read(size)
        packed, declared = self._sizes.get(at, (0, 0))
        unpacked = _unpacked(data[:packed])  # pyarrow may read past the column chunk
        if unpacked > max(declared, BATCH_BYTES // BATCH_ROWS):
            raise ValueError(f"a column has {unpacked} bytes, not {declared} as in the metadata")
        return data


def _unpacked(pages: bytes) -> int:
    """Return the unpacked size of pages according to their headers.

    A header is a PageHeader struct in Thrift's compact protocol. Field 2 is the unpacked size, field 3 the size in the
    file. https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
    """
    at = total = 0
    while at < len(pages):
        sizes, at = _struct(pages, at)
        total += max(0, sizes.get(2, 0))
        at += max(0, sizes.get(3, 0))
    return total


def _struct(data: bytes, at: int) -> tuple[dict[int, int], int]:
    """Return a struct's integers by field number, and the position after it."""
    integers: dict[int, int] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        kind = head & 15
        if kind in (4, 5, 6):
            integers[number], at = _integer(data, at)
        elif kind > 2:  # Kinds 1 and 2 (true, false) have no further bytes.
            at = _skipped(data, at, kind)
    return integers, at + 1


def _skipped(data: bytes, at: int, kind: int) -> int:
    """Return the position after a value, by its kind in Thrift's compact protocol."""
    if kind in (1, 2, 3):
        return at + 1
    if kind in (4, 5, 6):
        return _integer(data, at)[1]
    if kind == 7:
        return at + 8
    if kind == 8:
        length, at = _varint(data, at)
        return at + length
    if kind in (9, 10):
        n, kind, at = data[at] >> 4, data[at] & 15, at + 1
        if n == 15:
            n, at = _varint(data, at)
        for _ in range(n):
            at = _skipped(data, at, kind)
        return at
    if kind == 12:
        return _struct(data, at)[1]
    raise ValueError(f"a header of a page has a value of kind {kind}")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return value >> 1 ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number in 7-bit groups, lowest first, and the position after it."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
        shift += 7
