"""SlimPajama-shaped shards: finding them, reading their documents, and counting the lines that hold none.

A shard is a `*.jsonl.zst` (or plain `*.jsonl`) file of rows {"text": ..., "meta": {"redpajama_set_name":
...}}. Two layouts are supported: domains mixed in every shard, and one directory per domain. The domain is the
row's set name or, if a row has none, a directory in its path with the name of a domain. The split is a
directory in the path called train, validation or test; without one, a shard belongs to train. Paths may be
anything that fsspec can open.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import fsspec
import zstandard

from seqjax.data import slimpajama
from seqjax.errors import UserError

SPLITS = ("train", "validation", "test")
SUFFIXES = (".jsonl.zst", ".jsonl")
CHUNK = 1 << 18
MAX_NAMED = 100  # skipped lines listed per shard; all are counted
MAX_WINDOW = 1 << 31  # files made with --long=27 need 128 MiB; zstd itself goes to 2 GiB

# A quoted key before a colon: inside a JSON string its quotes would be escaped.
_SET_NAME = re.compile(rb'"redpajama_set_name"\s*:\s*"([^"]*)"')


class BadLineError(Exception):
    """A line that does not hold a document; the message says why."""


class TornShardError(Exception):
    """A shard whose compressed data ends early or is damaged; the lines before that point are valid."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file: its URL, its name relative to the source, its split and its size in bytes."""

    url: str
    name: str
    split: str
    size: int

    @property
    def domain(self) -> str | None:
        """The domain that a directory in the path names, or None."""
        for part in self.name.split("/")[:-1][::-1]:
            domain = slimpajama.BY_SET_NAME.get(part, part)
            if domain in slimpajama.NAMES:
                return domain
        return None


def find_shards(source: str) -> list[Shard]:
    """Return the shards below a directory, or those that a glob matches, ordered by split and name.

    Raises `UserError` if `source` does not exist or holds no shards.
    """
    fs, root = cast(tuple[Any, str], fsspec.core.url_to_fs(source))
    if any(mark in source for mark in "*?["):
        found = fs.glob(root, detail=True)
        parts = root.split("/")
        fixed = next(i for i, part in enumerate(parts) if any(mark in part for mark in "*?["))
        base = "/".join(parts[: min(fixed, len(parts) - 1)])
    elif fs.isdir(root):
        found, base = fs.find(root, detail=True), root.rstrip("/")
    elif fs.isfile(root):
        found, base = {root: fs.info(root)}, root.rpartition("/")[0]
    else:
        raise UserError(f"There is no file or directory {source}; give where the *.jsonl.zst shards are.")
    outer = base.rpartition("/")[2]  # --source=.../train names the split itself
    shards = []
    for path, info in found.items():
        if path.endswith(SUFFIXES) and info["type"] == "file":
            name = path.removeprefix(base).lstrip("/")
            split = next((part for part in (*name.split("/")[:-1][::-1], outer) if part in SPLITS), "train")
            shards.append(Shard(fs.unstrip_protocol(path), name, split, info["size"]))
    if not shards:
        wanted = " or ".join(SUFFIXES)
        raise UserError(f"{source} holds no {wanted} files; give the directory or glob of the shards.")
    return sorted(shards, key=lambda shard: (SPLITS.index(shard.split), shard.name))


def read_lines(shard: Shard, *, on_read: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yield the lines of a shard; raise `TornShardError` at the end of a torn one.

    `on_read` is called with the number of bytes read from the file, before decompression.
    """
    pending: list[bytes] = []
    with cast(Any, fsspec.open(shard.url, "rb")) as file:
        pieces = _chunks(file, on_read)
        for piece in _decompressed(pieces) if shard.url.endswith(".zst") else pieces:
            head, *tail = piece.split(b"\n")
            pending.append(head)
            if tail:
                yield b"".join(pending)
                yield from tail[:-1]
                pending = [tail[-1]]
    last = b"".join(pending)
    if last:
        yield last


def _chunks(file, on_read: Callable[[int], None] | None) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        if on_read is not None:
            on_read(len(chunk))
        yield chunk


def _decompressed(chunks: Iterator[bytes]) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    frame = None
    try:
        for chunk in chunks:
            data = chunk
            while data:  # a file may hold several frames
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = None
    except zstandard.ZstdError as error:
        raise TornShardError(f"damaged zstd data ({error})") from None
    if frame is not None:
        raise TornShardError("zstd data ends in the middle of a frame")


def set_name(line: bytes) -> str | None:
    """Return the domain that a line names, found by pattern so that rows of other domains need not be parsed."""
    match = _SET_NAME.search(line, max(0, len(line) - 512)) or _SET_NAME.search(line)
    return slimpajama.BY_SET_NAME.get(match[1].decode("utf-8", "replace")) if match else None


def parse(line: bytes, *, default: str | None = None) -> tuple[str, str]:
    """Return (domain, text) of a line, or raise `BadLineError`; `default` is the domain of rows without a set name."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadLineError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise BadLineError("not JSON") from None
    if not isinstance(row, dict):
        raise BadLineError("not a JSON object")
    text = row.get("text")
    if not isinstance(text, str):
        raise BadLineError("no text")
    if not text.strip():
        raise BadLineError("empty document")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # "\ud800" is valid JSON but not text.
        raise BadLineError("not UTF-8") from None
    meta = row.get("meta")
    name = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    if name is None:
        if default is None:
            raise BadLineError("no meta.redpajama_set_name")
        return default, text
    domain = slimpajama.BY_SET_NAME.get(name) if isinstance(name, str) else None
    if domain is None:
        raise BadLineError("unknown set name")
    return domain, text


class Skipped:
    """The lines that were left out, counted by reason; the first ones are listed."""

    def __init__(self, name: str, *, strict: bool = False):
        self.name, self.strict = name, strict
        self.reasons: Counter[str] = Counter()
        self.first: list[dict[str, Any]] = []

    def add(self, line: int, reason: str, *, detail: str = "") -> None:
        """Record a line; raise `UserError` instead if strict."""
        why = f"{reason}: {detail}" if detail else reason
        if self.strict:
            raise UserError(
                f"{self.name}:{line}: {why}. Fix the file, or run without --strict to skip and count such lines."
            )
        self.reasons[reason] += 1
        if len(self.first) < MAX_NAMED:
            self.first.append({"file": self.name, "line": line, "reason": why})

    def report(self) -> dict[str, Any]:
        """Return the counts and the first lines, for a manifest."""
        return {
            "count": self.reasons.total(),
            "by_reason": dict(sorted(self.reasons.items())),
            "first": self.first,
        }


def documents(
    shard: Shard,
    domains: tuple[str, ...],
    skipped: Skipped,
    *,
    on_read: Callable[[int], None] = lambda n_bytes: None,
) -> Iterator[tuple[str, str]]:
    """Yield (domain, text) of the valid lines of the given domains; bad lines are recorded in `skipped`.

    `on_read` is called with the number of bytes read from the file, before decompression.
    """
    wanted = frozenset(domains)
    all_wanted = wanted == frozenset(slimpajama.NAMES)
    number = 0
    try:
        for number, line in enumerate(read_lines(shard, on_read=on_read), start=1):
            if not all_wanted and (named := set_name(line)) is not None and named not in wanted:
                continue
            try:
                domain, text = parse(line, default=shard.domain)
            except BadLineError as error:
                skipped.add(number, str(error))
                continue
            if domain in wanted:
                yield domain, text
    except TornShardError as error:
        skipped.add(number + 1, "torn shard", detail=f"{error}; the lines before it were kept")
