"""Rows of parquet files, read by the package pyarrow (the extra `parquet`)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from seqjax import store
from seqjax.data.faults import TornShardError
from seqjax.errors import MissingPackageError

BATCH_ROWS = 256


def require() -> None:
    """Raise `UserError` if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingPackageError(
            "Parquet files need pyarrow: install it with `pip install 'seqjax[parquet]'`."
        ) from None


def rows(url: str, fields: Sequence[str], *, size: int, on_read: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as dicts with the columns that hold `fields`, in order.

    If the file lacks one of them its rows have all columns, so that an error can tell what there is. `on_read` is told
    of `size`, the bytes of the file, in proportion to the rows. Raises `TornShardError` at the end of what can be read
    of a damaged file.
    """
    require()
    import pyarrow  # pyright: ignore[reportMissingImports]
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    with store.reading(url) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file)
            present = table.schema_arrow.names
            # `meta.source` is the column of that name, or the field `source` of the column `meta`.
            columns = {field if field in present else field.partition(".")[0] for field in fields}
            told = done = 0
            chosen = sorted(columns) if columns <= set(present) else None
            for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=chosen):
                yield from batch.to_pylist()
                done += batch.num_rows
                now = size * done // max(1, table.metadata.num_rows)
                on_read(now - told)
                told = now
        except (pyarrow.ArrowException, OSError) as error:
            raise TornShardError(f"damaged parquet data ({error})") from None
