"""Shards of text: finding them, reading their documents, and counting the lines that hold none.

A shard is a file of JSON lines (plain, gzip or zstd) or a parquet file with a document per row, or a text file that is
one document. `seqjax.data.layout` says where the text of a row and its domain are found; by default it is SlimPajama's
layout, rows {"text": ..., "meta": {"redpajama_set_name": ...}} or a directory per domain. The split is a
directory in the path called train, validation or test; without one, a shard belongs to train. Paths may be
anything that fsspec can open.
"""

import contextlib
import dataclasses
import glob
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard
from fsspec.implementations.local import LocalFileSystem

from seqjax import store, urls
from seqjax.data import parquet, slimpajama
from seqjax.data.faults import BadLineError, TornShardError
from seqjax.data.layout import SET_NAME_FIELD, SPLITS, Layout
from seqjax.errors import UserError

LINES = (".jsonl.zst", ".jsonl", ".jsonl.gz", ".json.gz", ".json.zst")  # files of JSON lines
PARQUET = ".parquet"
TEXT = ".txt"  # a document each
SLIMPAJAMA = Layout()
CHUNK = 1 << 18
MAX_NAMED = 100  # skipped lines listed per shard; all are counted
MAX_FOUND = 1000  # things found instead of documents that are told apart per shard
MAX_WINDOW = 1 << 31  # files made with --long=27 need 128 MiB; zstd itself goes to 2 GiB

# A quoted key before a colon: inside a JSON string its quotes would be escaped.
_SET_NAME = re.compile(rb'"redpajama_set_name"\s*:\s*"([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file: its URL, its name relative to the source, its split and its size in bytes."""

    url: str
    name: str
    split: str
    size: int

    @property
    def domain(self) -> str | None:
        """The domain of SlimPajama's that a directory in the path names, or None."""
        return SLIMPAJAMA.file_domain(self.name)


def suffixes(layout: Layout) -> tuple[str, ...]:
    """Return the ends of the names of files that `documents` reads in a layout; a text file has no fields."""
    return (*LINES, PARQUET, TEXT) if layout.reads_whole_files else (*LINES, PARQUET)


def find_shards(source: str, *, suffixes: tuple[str, ...] = LINES) -> list[Shard]:
    """Return the shards below a directory, or those that a glob matches, ordered by split and name.

    Links to files and directories are followed. Raises `UserError` if `source` does not exist or holds no files of
    these `suffixes`, or for a link to a file that does not exist.
    """
    fs, root = store.filesystem(source)
    with store.reaching(source) if urls.is_remote(source) else contextlib.nullcontext():
        return _found(fs, root, source, suffixes)


def _found(fs: Any, root: str, source: str, suffixes: tuple[str, ...]) -> list[Shard]:
    local = isinstance(fs, LocalFileSystem)
    fs.invalidate_cache()  # of what was there before
    if any(mark in source for mark in "*?["):
        if local:  # The glob of fsspec does not look into directories that are links.
            paths = glob.glob(root, recursive=True)  # noqa: PTH207 - a pattern that may be absolute
            found = {path: {} if Path(path).is_symlink() else fs.info(path) for path in paths}
        else:
            found = fs.glob(root, detail=True)
        parts = root.split("/")
        fixed = next(i for i, part in enumerate(parts) if any(mark in part for mark in "*?["))
        base = "/".join(parts[: min(fixed, len(parts) - 1)])
    elif fs.isdir(root):
        found, base = fs.find(root, detail=True), root.rstrip("/")
    elif fs.isfile(root):
        found, base = {root: fs.info(root)}, root.rpartition("/")[0]
    else:
        raise UserError(f"There is no file or directory {source}; give where the shards are.")
    outer = base.rpartition("/")[2]  # --source=.../train names the split itself
    found = _followed(fs, found) if local else found
    shards = []
    for path, info in found.items():
        if path.endswith(suffixes) and info["type"] != "directory":
            if info["type"] != "file":
                raise UserError(f"{path} is not a file that can be read; give the directory or glob of the shards.")
            name = path.removeprefix(base).lstrip("/")
            split = next((part for part in (*name.split("/")[:-1][::-1], outer) if part in SPLITS), "train")
            shards.append(Shard(fs.unstrip_protocol(path), name, split, info["size"]))
    if not shards:
        raise UserError(
            f"{source} holds no {', '.join(suffixes[:-1])} or {suffixes[-1]} files; give the directory or glob of the "
            f"shards.{_others(list(found), suffixes)}"
        )
    return sorted(shards, key=lambda shard: (SPLITS.index(shard.split), shard.name))


def _followed(fs: Any, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the files of a local directory with what links lead to in place of the links, which fsspec leaves out.

    A link to a directory that it lies in adds nothing and is left out.
    """
    files = {}
    for path, info in found.items():
        if not Path(path).is_symlink():
            files[path] = info
            continue
        try:
            target = fs.info(path)
        except OSError:
            raise UserError(f"{path} is a link to what does not exist; mend or remove it.") from None
        if target["type"] != "directory":
            files[path] = target
        elif not Path(path).parent.resolve().is_relative_to(Path(path).resolve()):
            files |= _followed(fs, fs.find(path, detail=True))
    return files


def _others(paths: list[str], suffixes: tuple[str, ...]) -> str:
    """Return " Found: 3 .txt, 1 .csv." about the files that were found, as the end of a message."""
    kinds = Counter("." + path.rpartition("/")[2].rpartition(".")[2] for path in paths)
    found = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(5)) or "nothing"
    text = TEXT in kinds and TEXT not in suffixes
    return f" Found: {found}." + (" Text files need --domain=NAME or --domain_from=folder." if text else "")


def read_lines(shard: Shard, *, on_read: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yield the lines of a shard; raise `TornShardError` at the end of a torn one.

    `on_read` is called with the number of bytes read from the file, before decompression.
    """
    pending: list[bytes] = []
    for piece in _decompressed(_chunks(shard.url, on_read), suffix=shard.url.rpartition(".")[2]):
        head, *tail = piece.split(b"\n")
        pending.append(head)
        if tail:
            yield b"".join(pending)
            yield from tail[:-1]
            pending = [tail[-1]]
    last = b"".join(pending)
    if last:
        yield last


def _chunks(url: str, on_read: Callable[[int], None] | None) -> Iterator[bytes]:
    """Yield the bytes of a file; raise `UserError` if the store that it is in fails."""
    with store.reading(url) as file:
        while chunk := file.read(CHUNK):
            if on_read is not None:
                on_read(len(chunk))
            yield chunk


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


def set_name(line: bytes) -> str | None:
    """Return the domain that a line names, found by pattern so that rows of other domains need not be parsed."""
    match = _SET_NAME.search(line, max(0, len(line) - 512)) or _SET_NAME.search(line)
    return slimpajama.BY_SET_NAME.get(match[1].decode("utf-8", "replace")) if match else None


def parse(line: bytes, *, default: str | None = None, layout: Layout = SLIMPAJAMA) -> tuple[str, str]:
    """Return (domain, text) of a line, or raise `BadLineError`; `default` is the layout's domain of its file."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadLineError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise BadLineError("not JSON") from None
    if not isinstance(row, dict):
        raise BadLineError("not a JSON object")
    return layout.document(row, default=default)


class Skipped:
    """The lines that were left out, counted by reason; the first ones are listed."""

    def __init__(self, name: str, *, strict: bool = False):
        self.name, self.strict = name, strict
        self.reasons: Counter[str] = Counter()
        self.first: list[dict[str, Any]] = []
        self.found: dict[str, Counter[str]] = {}  # by reason: what there was instead
        self.elsewhere: Counter[str] = Counter()  # documents of domains that were not asked for
        self.lines = 0  # read so far, skipped or not

    def add(self, line: int, reason: str, *, detail: str = "", found: str = "") -> None:
        """Record a line; raise `UserError` instead if strict. `found` is what was there instead of a document."""
        why = f"{reason}: {detail}" if detail else reason
        if self.strict:
            raise UserError(
                f"{self.name}:{line}: {why}. Fix the file, or run without --strict to skip and count such lines."
            )
        self.reasons[reason] += 1
        counts = self.found.setdefault(reason, Counter()) if found else Counter()
        if found in counts or len(counts) < MAX_FOUND:
            counts[found] += 1
        if len(self.first) < MAX_NAMED:
            self.first.append({"file": self.name, "line": line, "reason": why})

    def report(self) -> dict[str, Any]:
        """Return the counts and the first lines."""
        return {
            "count": self.reasons.total(),
            "by_reason": dict(sorted(self.reasons.items())),
            "first": self.first,
            "found": {reason: dict(sorted(counts.items())) for reason, counts in sorted(self.found.items())},
            "elsewhere": dict(sorted(self.elsewhere.items())),
            "lines": self.lines,
        }


def documents(
    shard: Shard,
    domains: tuple[str, ...],
    skipped: Skipped,
    *,
    layout: Layout = SLIMPAJAMA,
    on_read: Callable[[int], None] = lambda n_bytes: None,
) -> Iterator[tuple[str, str]]:
    """Yield (domain, text) of the valid rows of the given domains, or of all if none are given.

    Bad rows are recorded in `skipped`, and those of other domains counted there. `on_read` is called with the number of
    bytes read from the file, before decompression.
    """
    default = layout.file_domain(shard.name)
    wanted = frozenset(domains)
    named_in_line = layout.is_slimpajama and bool(wanted) and wanted != frozenset(slimpajama.NAMES)
    try:
        for number, item in enumerate(_items(shard, layout, on_read), start=1):
            skipped.lines = number
            if named_in_line and isinstance(item, bytes) and (named := set_name(item)) and named not in wanted:
                skipped.elsewhere[named] += 1
                continue
            try:
                if isinstance(item, bytes):
                    domain, text = parse(item, default=default, layout=layout)
                else:
                    domain, text = layout.document(item, default=default)
            except BadLineError as error:
                skipped.add(number, str(error), found=error.found)
                continue
            if not wanted or domain in wanted:
                yield domain, text
            else:
                skipped.elsewhere[domain] += 1
    except TornShardError as error:
        skipped.add(skipped.lines + 1, "torn shard", detail=f"{error}; the lines before it were kept")


def _items(shard: Shard, layout: Layout, on_read: Callable[[int], None]) -> Iterator[bytes | dict[str, Any]]:
    """Yield the lines of a file of JSON lines, or the rows of another file; raise `TornShardError` for damage."""
    if shard.url.endswith(PARQUET):
        fields = [layout.text_field, "" if layout.reads_whole_files else layout.domain_field or SET_NAME_FIELD]
        yield from parquet.rows(shard.url, [field for field in fields if field], size=shard.size, on_read=on_read)
    elif shard.url.endswith(TEXT):
        content = b"".join(_chunks(shard.url, on_read))
        # Bytes that are not UTF-8 become what `Layout.document` refuses as such.
        text = content.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
        yield {layout.text_field: text}
    else:
        yield from read_lines(shard, on_read=on_read)
