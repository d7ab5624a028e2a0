"""Arrow files, as `save_to_disk` of Hugging Face datasets writes them, read by pyarrow (the extra `parquet`)."""

from collections.abc import Callable, Iterator
from typing import Any

from seqjax import store
from seqjax.data.layout import SLIMPAJAMA, Layout
from seqjax.data.sources import Shard, TornShardError, ignore
from seqjax.data.sources.parquet import BATCH_ROWS, Parquet


class Arrow(Shard):
    """A file in the Arrow streaming format, whose records are its rows; a split has a folder with its name."""

    endings = (".arrow",)
    package = "pyarrow"

    def records(
        self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows; raise `TornShardError` at the end of the readable part of a damaged file."""
        del layout  # all columns are read from the file anyway
        self.require()
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.ipc  # pyright: ignore[reportMissingImports]

        told = 0
        with store.reading(self.url) as file:
            try:
                for batch in pyarrow.ipc.open_stream(file):
                    for start in range(0, batch.num_rows, BATCH_ROWS):
                        yield from batch.slice(start, BATCH_ROWS).to_pylist()
                    now = file.tell()
                    on_read(now - told)
                    told = now
            except (pyarrow.ArrowException, OSError) as error:
                raise TornShardError(f"damaged Arrow data ({error})") from None

    @classmethod
    def require(cls) -> None:
        """Raise `MissingPackageError` if pyarrow is not installed."""
        Parquet.require()
