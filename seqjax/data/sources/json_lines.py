"""Files of JSON lines, plain or compressed with gzip or zstd, a document per line."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

from seqjax.data.layout import SLIMPAJAMA, Layout
from seqjax.data.sources import Shard, TornShardError, ignore

MAX_WINDOW = 1 << 31  # files made with --long=27 need 128 MiB; zstd itself goes to 2 GiB


class JsonLines(Shard):
    """A file of JSON lines, whose records are its lines as bytes."""

    endings = (
        *(".jsonl.zst", ".jsonl", ".jsonl.gz", ".json.gz", ".json.zst"),
        *(".ndjson", ".ndjson.gz", ".ndjson.zst"),
    )

    def records(self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore) -> Iterator[bytes]:
        """Yield the lines; raise `TornShardError` at the end of a torn file."""
        del layout
        pending: list[bytes] = []
        for piece in _decompressed(self.content(on_read), suffix=self.url.rpartition(".")[2].lower()):
            head, *tail = piece.split(b"\n")
            pending.append(head)
            if tail:
                yield b"".join(pending)
                yield from tail[:-1]
                pending = [tail[-1]]
        last = b"".join(pending)
        if last:
            yield last


def _decompressed(chunks: Iterator[bytes], *, suffix: str) -> Iterator[bytes]:
    """Yield the content of a file called `.suffix` from its chunks; raise `TornShardError` where it is damaged."""
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
            data = chunk
            empty = False
            while data:  # a file may hold several frames
                frame = frame or (zstd.decompressobj() if kind == "zstd" else zlib.decompressobj(wbits=31))
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = None
    except damage as error:
        raise TornShardError(f"damaged {kind} data ({error})") from None
    if empty:
        raise TornShardError(f"{kind} data of 0 bytes")
    if frame is not None:
        raise TornShardError(f"{kind} data ends in the middle of a frame")
