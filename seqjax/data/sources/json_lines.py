"""Read JSON lines, plain or compressed with gzip or zstd, one document per line."""

import codecs
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

from seqjax.data import sources
from seqjax.data.layout import SLIMPAJAMA, Layout
from seqjax.data.sources import Shard, TornShardError, ignore

ZSTD_BYTES, GZIP_BYTES = 1024, 1 << 20  # per call: compressed bytes into zstd, unpacked bytes out of gzip
MAX_WINDOW = 1 << 31  # files made with --long=27 need 128 MiB; zstd allows 2 GiB


class JsonLines(Shard):
    """A JSON lines file; its records are the lines as bytes."""

    endings = (
        *(".jsonl.zst", ".jsonl", ".jsonl.gz", ".json.gz", ".json.zst"),
        *(".ndjson", ".ndjson.gz", ".ndjson.zst"),
    )

    def records(self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore) -> Iterator[bytes]:
        """Yield the lines.

        Raises `TornShardError` where a damaged file ends, and `UserError` for a line over `MOST_TEXT` bytes.
        """
        del layout
        for number, line in enumerate(self._lines(on_read)):
            yield line if number else line.removeprefix(codecs.BOM_UTF8)

    def _lines(self, on_read: Callable[[int], None]) -> Iterator[bytes]:
        pending: list[bytes] = []
        number, held = 1, 0
        for piece in _decompressed(self.content(on_read), suffix=self.url.rpartition(".")[2].lower()):
            head, *tail = piece.split(b"\n")
            pending.append(head)
            held += len(head)
            if held > sources.MOST_TEXT:
                raise sources.too_long(f"{self.url}: line {number}")
            if tail:
                yield b"".join(pending)
                yield from tail[:-1]
                pending = [tail[-1]]
                number, held = number + len(tail), len(tail[-1])
        last = b"".join(pending)
        if last:
            yield last


def _decompressed(chunks: Iterator[bytes], *, suffix: str) -> Iterator[bytes]:
    """Yield a file's decompressed content; `suffix` selects the format.

    Raises `TornShardError` where the file is damaged.
    """
    kinds = {"zst": ("zstd", zstandard.ZstdError), "gz": ("gzip", zlib.error)}
    if suffix not in kinds:
        yield from chunks
        return
    kind, damage = kinds[suffix]
    zstd = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    frame: Any = None
    empty = True
    try:
        for chunk in chunks:
            empty = False
            # zstd unpacks its whole input in one call, and a few bytes may unpack to 128 KiB.
            step = ZSTD_BYTES if kind == "zstd" else len(chunk)
            for start in range(0, len(chunk), step):
                data = chunk[start : start + step]
                while data:  # a file may hold several frames
                    if kind == "zstd":
                        frame = frame or zstd.decompressobj()
                        yield frame.decompress(data)
                        data = frame.unused_data if frame.eof else b""
                    else:
                        frame = frame or zlib.decompressobj(wbits=31)
                        yield frame.decompress(data, GZIP_BYTES)
                        data = frame.unused_data if frame.eof else frame.unconsumed_tail
                    if frame.eof:
                        frame = None
    except damage as error:
        raise TornShardError(f"damaged {kind} data ({error})") from None
    if empty:
        raise TornShardError(f"{kind} data of 0 bytes")
    if frame is not None:
        raise TornShardError(f"{kind} data ends in the middle of a frame")
