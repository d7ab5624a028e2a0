"""Read text files, one document per file."""

from collections.abc import Callable, Iterator

from seqjax.data import sources
from seqjax.data.layout import SLIMPAJAMA, Layout
from seqjax.data.sources import Shard, ignore


class TextFile(Shard):
    """A UTF-8 file, with or without a byte-order mark; its only record is its text."""

    endings = (".txt",)
    is_whole = True

    def records(
        self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore
    ) -> Iterator[dict[str, str]]:
        """Yield one row.

        Raises `UserError` if the file exceeds `MOST_TEXT` bytes.
        """
        pieces, held = [], 0
        for piece in self.content(on_read):
            pieces.append(piece)
            held += len(piece)
            if held > sources.MOST_TEXT:
                raise sources.too_long(self.url)
        content = b"".join(pieces)
        # Invalid UTF-8 becomes characters that `Layout.document` refuses.
        yield {layout.text_field: content.decode("utf-8", "surrogateescape").removeprefix("\ufeff")}
