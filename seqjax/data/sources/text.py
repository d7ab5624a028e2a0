"""Text files with a document each."""

from collections.abc import Callable, Iterator

from seqjax.data.layout import SLIMPAJAMA, Layout
from seqjax.data.sources import Shard, ignore


class TextFile(Shard):
    """A file in UTF-8, with or without a byte-order mark, whose one record is its text."""

    endings = (".txt",)
    is_whole = True

    def records(
        self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore
    ) -> Iterator[dict[str, str]]:
        """Yield the one row."""
        content = b"".join(self.content(on_read))
        # Bytes that are not UTF-8 become characters that `Layout.document` refuses.
        yield {layout.text_field: content.decode("utf-8", "surrogateescape").removeprefix("\ufeff")}
