"""The jobs of `seqjax.data.prepare` that worker processes run: tokenise a shard, write a file of blocks.

A *part* is what one shard becomes: `NAME.bin`, the tokens of its domains one after the other, `NAME.npz`, the
lengths of their documents, and `NAME.json`, their counts, written last, which says that the shard is done.
Block files are cut from the parts of a domain in the order of the shards, as if they were one stream. So
nothing depends on how many processes there are or when they are killed.
"""

import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data import blocks, document_index, shards, slimpajama
from seqjax.data.documents import Skipped, documents
from seqjax.data.progress import count
from seqjax.data.tokenizer import Tokenizer, load_tokenizer
from seqjax.errors import UserError

BATCH_CHARS = 1 << 19  # of text given to the tokenizer at a time
HISTOGRAM = 24  # documents by log2 of their tokens
READ_TOKENS = 1 << 22


@dataclasses.dataclass(frozen=True)
class ShardJob:
    """Tokenise `shard` into `part` (.bin, .npz and .json)."""

    shard: shards.Shard
    part: Path
    tokenizer: str
    tokenizer_path: str
    domains: tuple[str, ...]
    min_tokens: int = 0
    max_tokens: int = 0
    strict: bool = False


@dataclasses.dataclass(frozen=True)
class FileJob:
    """Write `path` from `segments` (file, first token, tokens), `block` tokens a record; then `done`."""

    path: Path
    done: Path
    segments: tuple[tuple[Path, int, int], ...]
    block: int


class _DomainTokens:
    """What one shard holds of one domain."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.documents = self.bytes = self.tokens = 0
        self.histogram = np.zeros(HISTOGRAM, np.int64)

    def add(self, ids: np.ndarray, *, size: int, tokenizer: Tokenizer) -> None:
        """Append BOS + document + EOS."""
        self.arrays += [np.array([tokenizer.bos], np.uint16), ids, np.array([tokenizer.eos], np.uint16)]
        self.lengths.append(len(ids) + 2)
        self.documents += 1
        self.bytes += size
        self.tokens += len(ids) + 2
        self.histogram[min(len(ids).bit_length(), HISTOGRAM - 1)] += 1


def tokenize_shard(job: ShardJob) -> None:
    """Run a `ShardJob`; raises `UserError` for a full disk and, if strict, for the first bad line."""
    tokenizer = load_tokenizer(job.tokenizer, job.tokenizer_path)
    held = {domain: _DomainTokens() for domain in slimpajama.NAMES}
    skipped = Skipped(job.shard.name, strict=job.strict)
    short = 0
    batch: list[tuple[str, str]] = []

    def flush() -> None:
        nonlocal short
        tokens = text = 0
        for (domain, document), ids in zip(batch, tokenizer.encode_batch([d for _, d in batch]), strict=True):
            text += (size := len(document.encode()))
            tokens += len(ids) + 2
            if len(ids) < job.min_tokens:
                short += 1
                continue
            held[domain].add(ids[: job.max_tokens or None], size=size, tokenizer=tokenizer)
        count(tokens=tokens, text=text)
        batch.clear()

    characters = 0
    for domain, document in documents(job.shard, job.domains, skipped):
        batch.append((domain, document))
        characters += len(document)
        if characters >= BATCH_CHARS:
            flush()
            characters = 0
    flush()
    used = {domain: tokens for domain, tokens in held.items() if tokens.documents}
    report = {
        "domains": {
            domain: {
                "documents": tokens.documents,
                "bytes": tokens.bytes,
                "tokens": tokens.tokens,
                "documents_by_log2_tokens": tokens.histogram.tolist(),
            }
            for domain, tokens in used.items()
        },
        "too_short": short,
        "skipped": skipped.report(),
    }
    try:
        job.part.parent.mkdir(parents=True, exist_ok=True)
        binary = job.part.with_suffix(".bin")
        temporary = job.part.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            for tokens in used.values():
                for array in tokens.arrays:
                    file.write(array.astype(blocks.DTYPE, copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(binary)
        document_index.write(
            job.part.with_suffix(".npz"), {name: np.array(tokens.lengths) for name, tokens in used.items()}
        )
        blocks.write_json(job.part.with_suffix(".json"), report)
    except OSError as error:
        raise _cannot_write(job.part, error) from error


def write_file(job: FileJob) -> None:
    """Run a `FileJob`; raises `UserError` for a full disk."""
    try:
        digest = blocks.write_records(job.path, _rows(job))
        records = sum(tokens for _, _, tokens in job.segments) // job.block
        job.done.parent.mkdir(parents=True, exist_ok=True)
        blocks.write_json(job.done, {"sha256": digest, "blocks": records})
    except OSError as error:
        raise _cannot_write(job.path, error) from error
    count(source=sum(tokens for _, _, tokens in job.segments))


def _rows(job: FileJob) -> Iterator[np.ndarray]:
    rest = np.empty(0, blocks.DTYPE)
    for path, first, tokens in job.segments:
        for start in range(first, first + tokens, READ_TOKENS):
            size = min(READ_TOKENS, first + tokens - start)
            ids = np.fromfile(path, blocks.DTYPE, size, offset=start * blocks.DTYPE.itemsize)
            rest = np.concatenate([rest, ids])
            whole = len(rest) // job.block * job.block
            yield rest[:whole].reshape(-1, job.block)
            rest = rest[whole:]


def _cannot_write(path: Path, error: OSError) -> UserError:
    why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return UserError(
        f"Cannot write {path}: {why}. Finished shards are kept: make room (or move the directory) and run "
        "the same command again."
    )


def is_done(job: ShardJob) -> bool:
    """Whether the part of a shard is whole; one of an older version lacks the lengths of its documents."""
    return read_report(job.part.with_suffix(".json")) is not None and job.part.with_suffix(".npz").is_file()


def read_report(path: Path) -> dict[str, Any] | None:
    """The report of a finished job, None if it is not finished."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
