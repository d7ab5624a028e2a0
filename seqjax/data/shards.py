"""Find text shards, read their documents, and count records without a document.

A shard is a file that a source reads (`seqjax.data.sources`). Its folders or its name determine its split
(`seqjax.data.splits`). `seqjax.data.layout` locates the text and the domain in a record. The default layout is
SlimPajama's: rows {"text": ..., "meta": {"redpajama_set_name": ...}} or one directory per domain. Paths may be anything
that fsspec can open.
"""

import contextlib
import glob
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from seqjax import store
from seqjax.data import sources, splits
from seqjax.data.layout import SLIMPAJAMA, BadLineError, Document, Layout, field_of, shown
from seqjax.data.sources import Shard, TornShardError, ignore, kinds
from seqjax.errors import UserError

MAX_NAMED = 100  # skipped lines listed per shard; all are counted
MAX_ALIKE = 1000  # printed names that resemble a split
LEAST_COUNTED = 256  # bytes counted per record: a few kilobytes can unpack to a billion empty lines, microseconds each
MAX_CONTENTS = 1000  # distinct contents of bad records, counted per shard and reason


def find_shards(
    source: str, *, layout: Layout = SLIMPAJAMA, on_message: Callable[[str], None] = lambda text: None
) -> list[Shard]:
    """Return the shards below a directory or matching a glob, by split and name.

    If the directory is a dataset (`Shard.find`), its shards are returned; otherwise all files with a known ending.
    One-document files are included only if `layout` gives them a domain. Links to files and directories are followed.

    `on_message` receives messages about unread files, and about training files with names that resemble a split.

    Raises `UserError` if `source` does not exist, holds no readable files, or contains a broken link.
    """
    for kind in kinds():
        if dataset_shards := kind.find(source):
            return sorted(dataset_shards, key=_place)
    by_ending = {end: kind for kind in kinds() if layout.reads_whole_files or not kind.is_whole for end in kind.endings}
    fs, root = store.filesystem(source)
    with store.reaching(source) if store.is_remote(source) else contextlib.nullcontext():
        return _matching_shards(fs, root, source, by_ending, on_message)


def _place(shard: Shard) -> tuple[int, str]:
    return splits.SPLITS.index(shard.split), shard.name


def _matching_shards(
    fs: Any, root: str, source: str, by_ending: dict[str, type[Shard]], on_message: Callable[[str], None]
) -> list[Shard]:
    local = isinstance(fs, LocalFileSystem)
    fs.invalidate_cache()  # the content may have changed
    if any(mark in source for mark in "*?["):
        if local:  # fsspec's glob does not follow links to directories.
            paths = glob.glob(root, recursive=True)  # noqa: PTH207 - a pattern that may be absolute
            entries = {path: {} if Path(path).is_symlink() else fs.info(path) for path in paths}
        else:
            entries = fs.glob(root, detail=True)
        parts = root.split("/")
        fixed = next(i for i, part in enumerate(parts) if any(mark in part for mark in "*?["))
        base = "/".join(parts[: min(fixed, len(parts) - 1)])
    elif fs.isdir(root):
        entries, base = fs.find(root, detail=True), root.rstrip("/")
    elif fs.isfile(root):
        entries, base = {root: fs.info(root)}, root.rpartition("/")[0]
    else:
        raise UserError(f"There is no file or directory {source}; correct the path to the shards.")
    outer = base.rpartition("/")[2]  # --source=.../train names the split itself
    entries = _follow_links(fs, entries) if local else entries
    shards, trained, unread = [], [], []
    for path, info in entries.items():
        ending = next((end for end in by_ending if path.lower().endswith(end)), None)
        if info["type"] == "directory":
            continue
        if ending is None:
            unread.append(path)
            continue
        if info["type"] != "file":
            raise UserError(f"{path} is not a file that can be read; give the directory or glob of the shards.")
        name = path.removeprefix(base).lstrip("/")
        stem, kind = name[: -len(ending)], by_ending[ending]
        split = splits.split_of(stem, outer=outer, is_title=kind.is_whole)
        trained += [stem] if split == "train" else []
        shards.append(kind(fs.unstrip_protocol(path), name, split, info["size"]))
    if not shards:
        *endings, last = by_ending
        raise UserError(
            f"{source} holds no {', '.join(endings)} or {last} files; give the directory or glob of the shards."
            f"{_ending_counts(list(entries))}"
        )
    if unread:
        on_message(f"{source}: {len(unread)} files have unknown endings and are not read.{_ending_counts(unread)}")
    alike = splits.look_alikes(sorted(trained))
    if alike:
        on_message(
            f"{source}: {len(alike)} names look like a split, but are trained on; move files that are not for training "
            "into a folder called validation or test:"
        )
    for name in alike[:MAX_ALIKE]:
        on_message(f"  {name}")
    if len(alike) > MAX_ALIKE:
        on_message(f"  and {len(alike) - MAX_ALIKE} more")
    return sorted(shards, key=_place)


def _follow_links(fs: Any, entries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the files of a local directory, including linked files.

    fsspec leaves out linked directories. A link to a parent directory is ignored.
    """
    files = {}
    for path, info in entries.items():
        if not Path(path).is_symlink():
            files[path] = info
            continue
        try:
            target = fs.info(path)
        except OSError:
            raise UserError(f"{path} is a link to a missing file; repair or remove it.") from None
        if target["type"] != "directory":
            files[path] = target
        elif not Path(path).parent.resolve().is_relative_to(Path(path).resolve()):
            files |= _follow_links(fs, fs.find(path, detail=True))
    return files


def _ending_counts(paths: list[str]) -> str:
    """Return the file endings in `paths` as message text.

    Example: " Found: 3 .txt, 1 .csv." Whole-file endings add the option that they need.
    """
    endings = Counter("." + path.rpartition("/")[2].rpartition(".")[2] for path in paths)
    listing = ", ".join(f"{n} {ending}" for ending, n in endings.most_common(5)) or "nothing"
    whole = sorted(endings & Counter(end for kind in kinds() if kind.is_whole for end in kind.endings))
    advice = f" Files in {whole[0]} need --domain=NAME or --domain_from=folder." if whole else ""
    return f" Found: {listing}.{advice}"


def parse(record: bytes | dict[str, Any], *, default: str | None = None, layout: Layout = SLIMPAJAMA) -> Document:
    """Return the document in a record; raise `BadLineError` if there is none.

    `default` is the file's domain in this layout (`Layout.file_domain`).
    """
    if isinstance(record, dict):
        return layout.document(record, default=default)
    if not record.strip():
        raise BadLineError("empty line")
    try:
        row = json.loads(record.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadLineError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise BadLineError("not JSON") from None
    if not isinstance(row, dict):
        raise BadLineError("not a JSON object")
    return layout.document(row, default=default)


class Skipped:
    """Counts skipped lines by reason, and lists the first ones."""

    def __init__(self, name: str, *, strict: bool = False):
        self.name, self.strict = name, strict
        self.reasons: Counter[str] = Counter()
        self.first: list[dict[str, Any]] = []
        self.contents: dict[str, Counter[str]] = {}  # the actual content, by reason
        self.elsewhere: Counter[str] = Counter()  # documents in domains that were not requested
        self.lines = 0  # read so far, skipped or not

    def add(self, line: int, reason: str, *, detail: str = "", content: str = "") -> None:
        """Record a skipped line; raise `UserError` instead if strict.

        `content` is the line's actual content, such as an unknown domain name.
        """
        why = f"{reason}: {detail}" if detail else reason
        if self.strict:
            raise UserError(
                f"{self.name}:{line}: {why}. Fix the file and give another --out, or run without --strict to skip and "
                "count such lines."
            )
        self.reasons[reason] += 1
        counts = self.contents.setdefault(reason, Counter()) if content else Counter()
        if content in counts or len(counts) < MAX_CONTENTS:
            counts[content] += 1
        if len(self.first) < MAX_NAMED:
            self.first.append({"file": self.name, "line": line, "reason": why})

    def report(self) -> dict[str, Any]:
        """Return the counts and the first lines."""
        return {
            "count": self.reasons.total(),
            "by_reason": dict(sorted(self.reasons.items())),
            "first": self.first,
            "found": {reason: dict(sorted(counts.items())) for reason, counts in sorted(self.contents.items())},
            "elsewhere": dict(sorted(self.elsewhere.items())),
            "lines": self.lines,
        }


def records(
    shard: Shard, layout: Layout, *, on_read: Callable[[int], None] = ignore
) -> Iterator[bytes | dict[str, Any]]:
    """Yield a shard's records.

    Raises `UserError` if a record is too long, or if the shard unpacks to too much data for its file size.
    """
    most = max(sources.MOST_UNPACKED, sources.PACKED * shard.size)
    total = 0
    for number, record in enumerate(shard.records(layout, on_read=on_read), start=1):
        text = record if isinstance(record, bytes) else field_of(record, layout.text_field)
        length = len(text) if isinstance(text, bytes | str) else 0
        if length > sources.MOST_TEXT:
            raise sources.too_long(f"{shard.name}: record {number}")
        total += max(length, LEAST_COUNTED)
        if total > most:
            raise sources.too_large(shard.url)
        yield record


def documents(
    shard: Shard,
    domains: tuple[str, ...],
    skipped: Skipped,
    *,
    layout: Layout = SLIMPAJAMA,
    on_read: Callable[[int], None] = ignore,
) -> Iterator[Document]:
    """Yield the documents in `domains`, or all documents if `domains` is empty.

    Bad rows are recorded in `skipped`, and rows in other domains are counted there. `on_read` receives the number of
    bytes read from the file, before decompression.
    """
    default = layout.file_domain(shard.name)
    requested = frozenset(domains)
    try:
        for number, item in enumerate(records(shard, layout, on_read=on_read), start=1):
            skipped.lines = number
            try:
                document = parse(item, default=default, layout=layout)
            except BadLineError as error:
                skipped.add(number, str(error), content=error.content)
                continue
            if not requested or document.domain in requested:
                yield document
            else:
                skipped.elsewhere[document.domain] += 1
    except TornShardError as error:
        detail = f"{error}; the lines before it were kept"
        skipped.add(skipped.lines + 1, "torn shard", detail=detail, content=shown(str(error)))
