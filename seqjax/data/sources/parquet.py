"""Parquet files, a document per row, read by the package pyarrow (the extra `parquet`)."""

from collections.abc import Callable, Iterator
from typing import Any

from seqjax import store
from seqjax.data import sources
from seqjax.data.layout import SET_NAME_FIELD, SLIMPAJAMA, SOURCE_FIELD, URL_FIELDS, Layout
from seqjax.data.sources import Shard, TornShardError, ignore
from seqjax.utils import MissingPackageError

BATCH_ROWS = 256
BATCH_BYTES = 256 << 20  # of the rows read together, at most


class Parquet(Shard):
    """A parquet file, whose records are its rows with the columns that a layout reads, and those of the source."""

    endings = (".parquet",)
    package = "pyarrow"

    def records(
        self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows; raise `TornShardError` at the end of the readable part of a damaged file.

        If the file lacks a field of the layout, its rows have all columns, so that an error can list them.
        """
        self.require()
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]

        fields = [layout.text_field]
        if not layout.reads_whole_files:
            fields.append(layout.domain_field or SET_NAME_FIELD)
        with store.reading(self.url) as file:
            try:
                table = pyarrow.parquet.ParquetFile(file)
                present = table.schema_arrow.names
                # `meta.source` is the column of that name, or the field `source` of the column `meta`.
                columns = {field if field in present else field.partition(".")[0] for field in fields}
                told = done = 0
                if columns <= set(present):  # Names of columns that the file lacks select nothing.
                    columns |= {f for f in (SOURCE_FIELD, *URL_FIELDS) if f.partition(".")[0] not in columns}
                    chosen = sorted(columns)
                else:
                    chosen = None
                for batch in table.iter_batches(batch_size=_batch_rows(table.metadata, self.url), columns=chosen):
                    yield from batch.to_pylist()
                    done += batch.num_rows
                    now = self.size * done // max(1, table.metadata.num_rows)
                    on_read(now - told)
                    told = now
            except (pyarrow.ArrowException, OSError) as error:
                raise TornShardError(f"damaged parquet data ({error})") from None

    @classmethod
    def require(cls) -> None:
        """Raise `MissingPackageError` if pyarrow is not installed."""
        try:
            import pyarrow.parquet  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingPackageError(
                "Parquet and Arrow files need pyarrow: install it with `pip install 'seqjax[parquet]'`."
            ) from None


def _batch_rows(metadata: Any, url: str) -> int:
    """Return how many rows to read together; raise `UserError` if a column would unpack to too much.

    A value is stored once for all rows that have it, so each row may be as long as its column.
    """
    longest = 1
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        for column in map(group.column, range(metadata.num_columns)):
            unpacked = column.total_uncompressed_size
            if unpacked > max(sources.MOST_UNPACKED, sources.PACKED * column.total_compressed_size):
                raise sources.too_large(url)
            longest = max(longest, unpacked)
    return min(BATCH_ROWS, max(1, BATCH_BYTES // longest))
