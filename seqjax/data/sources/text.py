"""Text files with a document each."""

from collections.abc import Callable, Iterator

from seqjax.data import sources
from seqjax.data.layout import SLIMPAJAMA, Layout
from seqjax.data.sources import Shard, ignore


class TextFile(Shard):
    """A file in UTF-8, with or without a byte-order mark, whose one record is its text."""

    endings = (".txt",)
    is_whole = True

    def records(
        self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore
    ) -> Iterator[dict[str, str]]:
        """Yield the one row; raise `UserError` if the file is too long for a document."""
        pieces, held = [], 0
        for piece in self.content(on_read):
            pieces.append(piece)
            held += len(piece)
            if held > sources.MOST_TEXT:
                raise sources.too_long(self.url)
        content = b"".join(pieces)
        # Bytes that are not UTF-8 become characters that `Layout.document` refuses.
        yield {layout.text_field: content.decode("utf-8", "surrogateescape").removeprefix("\ufeff")}
