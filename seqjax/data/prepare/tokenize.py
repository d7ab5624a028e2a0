"""Converts shards to parts, the tokens of every document of one shard, in worker processes.

A *part* holds one shard: `NAME.bin`, the tokens of its domains one after the other, `NAME.npz`, the
lengths of their documents, and `NAME.json`, their counts, written last, which marks the shard as done.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np

from seqjax.data import blocks, document_index, shards, slimpajama
from seqjax.data.prepare.progress import count
from seqjax.data.prepare.reports import cannot_write, read_report
from seqjax.data.tokenizer import Tokenizer, load_tokenizer
from seqjax.files import write_json

BATCH_CHARS = 1 << 19  # characters of text passed to the tokenizer at a time
HISTOGRAM = 24  # bins: documents by log2 of their token count


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


class _DomainTokens:
    """The documents of one domain in one shard, as tokens."""

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
    """Run a `ShardJob`; raise `UserError` if the disk is full and, if strict, for the first bad line."""
    tokenizer = load_tokenizer(job.tokenizer, job.tokenizer_path)
    per_domain = {domain: _DomainTokens() for domain in slimpajama.NAMES}
    skipped = shards.Skipped(job.shard.name, strict=job.strict)
    n_too_short = 0
    batch: list[tuple[str, str]] = []

    def flush() -> None:
        nonlocal n_too_short
        tokens = text = 0
        for (domain, document), ids in zip(batch, tokenizer.encode_batch([d for _, d in batch]), strict=True):
            text += (size := len(document.encode()))
            tokens += len(ids) + 2
            if len(ids) < job.min_tokens:
                n_too_short += 1
                continue
            per_domain[domain].add(ids[: job.max_tokens or None], size=size, tokenizer=tokenizer)
        count(tokens=tokens, text=text)
        batch.clear()

    characters = 0
    for domain, document in shards.documents(
        job.shard, job.domains, skipped, on_read=lambda n_bytes: count(source=n_bytes)
    ):
        batch.append((domain, document))
        characters += len(document)
        if characters >= BATCH_CHARS:
            flush()
            characters = 0
    flush()
    used = {domain: tokens for domain, tokens in per_domain.items() if tokens.documents}
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
        "too_short": n_too_short,
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
        write_json(job.part.with_suffix(".json"), report)
    except OSError as error:
        raise cannot_write(job.part, error) from error


def is_done(job: ShardJob) -> bool:
    """Return whether a shard's part is complete; a part of an older version lacks the lengths of its documents."""
    return read_report(job.part.with_suffix(".json")) is not None and job.part.with_suffix(".npz").is_file()
