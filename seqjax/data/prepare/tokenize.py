"""Convert shards to parts, which hold the tokens of every document in a shard.

The files in a *part* are:

    NAME.bin          tokens, domain by domain
    NAME.npz          document lengths; if some will be held out, also document hashes and bytes
    NAME.sources.npz  document sources, with DOMAIN instead of SPLIT/DOMAIN (seqjax/data/document_sources.py)
    NAME.texts        the first 64 bits of every text's SHA-256, if the source has several splits
    NAME.json         counts, the hash of all text and checksums for the preceding files

NAME.json is written last and marks the shard as done. At most `HELD_TOKENS` tokens per shard are in memory; the rest
wait in an unnamed temporary file.
"""

import array
import contextlib
import dataclasses
import hashlib
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, cast

import numpy as np

from seqjax.data import document_index, document_sources, hold_out, shards
from seqjax.data.layout import SLIMPAJAMA, Document, Layout, ordered
from seqjax.data.prepare.progress import count
from seqjax.data.prepare.reports import cannot_write, is_same, read_report, write_report
from seqjax.data.sources import CHUNK
from seqjax.data.tokenizer import BATCH_CHARS, MIXTRAL_SHA256, ByteTokenizer, Tokenizer, id_dtype, load_tokenizer
from seqjax.errors import UserError
from seqjax.files import measure, replacing

HISTOGRAM = 24  # bins: documents by log2 token count
MAX_DOMAINS = 1000
HELD_TOKENS = 1 << 23
SOURCES, TEXTS = ".sources.npz", ".texts"
PART = (".bin", ".npz", SOURCES, TEXTS)  # files of a part, without its report


@dataclasses.dataclass(frozen=True)
class ShardJob:
    """Tokenise `shard` into `part`: .bin, .npz, .sources.npz, .texts and .json.

    `domains` are the domains to keep, or empty for all. `hold_out` means that some documents will be held out by their
    hash. `several_splits` means that the shards belong to several splits.
    """

    shard: shards.Shard
    part: Path
    tokenizer: str
    tokenizer_path: str
    domains: tuple[str, ...]
    layout: Layout = SLIMPAJAMA
    hold_out: bool = False
    several_splits: bool = False
    min_tokens: int = 0
    max_tokens: int = 0
    strict: bool = False

    @property
    def name(self) -> str:
        """The shard name."""
        return self.shard.name

    @property
    def done(self) -> Path:
        """The report that marks the part as complete."""
        return self.part.with_suffix(".json")

    def counts(self) -> dict[str, int]:
        """Return the finished job's work, in the units of `progress.count`."""
        domains = (read_report(self.done) or {}).get("domains", {}).values()
        tokens, text = (sum(counts[key] for counts in domains) for key in ("tokens", "bytes"))
        return {"tokens": tokens, "text": text, "source": self.shard.size}


class TextHash:
    """A hash over the documents of a shard, with their domains and sources."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, document: Document) -> bytes:
        """Add a document and return its text's SHA-256."""
        text = hashlib.sha256(document.text.encode()).digest()
        self._hash.update(repr((document.domain, document.source)).encode("utf-8", "backslashreplace") + text)
        return text

    def hex(self) -> str:
        """Return the hash over all added documents."""
        return self._hash.hexdigest()


class _DomainTokens:
    """One domain's documents in one shard, as tokens."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []  # in memory; these follow the tokens in the temporary file
        self.in_file: list[tuple[int, int]] = []  # offset and bytes in the temporary file
        self.lengths = array.array("q")
        self.sizes = array.array("q")  # bytes
        self.hashes = array.array("q")  # if some will be held out
        self.sources = array.array("q")  # indices into the names
        self.names = document_sources.Names()

    def add(self, ids: np.ndarray, *, size: int, source: str, tokenizer: Tokenizer) -> None:
        """Append BOS + document + EOS."""
        self.arrays += [np.array([tokenizer.bos]), ids, np.array([tokenizer.eos])]
        self.lengths.append(len(ids) + 2)
        self.sizes.append(size)
        self.sources.append(self.names.index(source))

    def taken(self, dtype: np.dtype) -> bytes:
        """Return the tokens in memory as bytes, and clear them."""
        out = b"".join(ids.astype(dtype, copy=False).tobytes() for ids in self.arrays)
        self.arrays.clear()
        return out


def histogram(lengths: np.ndarray) -> list[int]:
    """Return document counts by log2 token count.

    `lengths` include BOS and EOS; the histogram does not.
    """
    bits = [min(int(n - 2).bit_length(), HISTOGRAM - 1) for n in lengths]
    return np.bincount(bits, minlength=HISTOGRAM).tolist()


def tokenize_shard(job: ShardJob) -> None:
    """Run a `ShardJob`.

    Raises `UserError` if the disk is full or, if strict, for the first bad line.
    """
    with contextlib.ExitStack() as stack:
        _tokenize(job, stack)


def _tokenize(job: ShardJob, stack: contextlib.ExitStack) -> None:
    """Run a `ShardJob`; `stack` closes its temporary file."""
    tokenizer = load_tokenizer(job.tokenizer, job.tokenizer_path)
    dtype = id_dtype(tokenizer.vocab_size)
    # Only for these two tokenizers do the tokens' bytes always equal the text's bytes.
    unproven = tokenizer.hash not in (ByteTokenizer.hash, MIXTRAL_SHA256)
    per_domain: dict[str, _DomainTokens] = {}
    skipped = shards.Skipped(job.shard.name, strict=job.strict)
    n_too_short = by_tokens = read = held = 0
    batch: list[Document] = []
    texts, text_hash = array.array("Q"), TextHash()
    changed = job.shard.changed()
    waiting: IO[bytes] | None = None

    def to_file() -> None:
        """Move the tokens from memory to the temporary file."""
        nonlocal waiting, held
        try:
            if waiting is None:
                file = tempfile.TemporaryFile(dir=job.part.parent)  # noqa: SIM115 - the stack closes it
                waiting = stack.enter_context(file)
            for tokens in per_domain.values():
                if not (content := tokens.taken(dtype)):
                    continue
                tokens.in_file.append((waiting.tell(), len(content)))
                waiting.write(content)
        except OSError as error:
            raise cannot_write(job.part, error) from error
        held = 0

    def flush() -> None:
        nonlocal n_too_short, by_tokens, read, held
        tokens = text = 0
        for document, ids in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
            text += (size := len(document.text.encode()))
            digest = text_hash.add(document)
            tokens += len(ids) + 2
            if unproven:
                by_tokens += int(tokenizer.n_bytes[ids].sum()) - (tokenizer.adds_space and len(ids) > 0)
                read += size
            if len(ids) < job.min_tokens:
                n_too_short += 1
                continue
            domain_tokens = per_domain.setdefault(document.domain, _DomainTokens())
            domain_tokens.add(ids[: job.max_tokens or None], size=size, source=document.source, tokenizer=tokenizer)
            if job.hold_out:
                domain_tokens.hashes.append(hold_out.first_bits(digest))
            if job.several_splits:
                texts.append(int.from_bytes(digest[:8], "little"))
        require_few(per_domain)
        count(tokens=tokens, text=text)
        held += tokens
        if held > HELD_TOKENS:
            to_file()
        batch.clear()

    characters = 0
    for document in shards.documents(
        job.shard, job.domains, skipped, layout=job.layout, on_read=lambda n_bytes: count(source=n_bytes)
    ):
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARS:
            flush()
            characters = 0
    flush()
    if job.shard.changed() != changed:
        raise UserError(f"{job.shard.url} was changed while it was read; run the same command again.")
    used = {domain: per_domain[domain] for domain in ordered(per_domain)}
    report = {
        "domains": {
            domain: {
                "documents": len(tokens.lengths),
                "bytes": sum(tokens.sizes),
                "tokens": sum(tokens.lengths),
                "documents_by_log2_tokens": histogram(np.array(tokens.lengths)),
            }
            for domain, tokens in used.items()
        },
        "too_short": n_too_short,
        "skipped": skipped.report(),
        "text_sha256": text_hash.hex(),
    }
    if unproven:
        report["token_bytes"] = {"text": read, "by_tokens": by_tokens}
    try:
        with replacing(job.part.with_suffix(".bin")) as file:
            for tokens in used.values():
                for offset, n_bytes in tokens.in_file:
                    _copy(cast(IO[bytes], waiting), file, offset, n_bytes)
                file.write(tokens.taken(dtype))
        arrays = {name: np.array(tokens.lengths) for name, tokens in used.items()}
        if job.hold_out:
            arrays |= {f"{name}/bytes": np.array(tokens.sizes) for name, tokens in used.items()}
            arrays |= {f"{name}/hash": np.array(tokens.hashes) for name, tokens in used.items()}
        document_index.write(job.part.with_suffix(".npz"), arrays)
        known = {name: tokens for name, tokens in used.items() if tokens.names}
        document_sources.write(
            job.part.with_suffix(SOURCES),
            {name: np.array(tokens.sources) for name, tokens in known.items()},
            {name: tokens.names for name, tokens in known.items()},
        )
        with replacing(job.part.with_suffix(TEXTS)) as file:
            file.write(np.array(texts, "<u8").tobytes())
        report["files"] = {suffix: measure(job.part.with_suffix(suffix)) for suffix in PART}
        write_report(job.done, report)
    except OSError as error:
        raise cannot_write(job.part, error) from error


def _copy(source: IO[bytes], target: IO[bytes], offset: int, n_bytes: int) -> None:
    source.seek(offset)
    while n_bytes:
        piece = source.read(min(n_bytes, CHUNK))
        target.write(piece)
        n_bytes -= len(piece)


def require_few(domains: Collection[str]) -> None:
    """Raise `UserError` for more than `MAX_DOMAINS` domains, likely a mistake.

    Each domain has its own files.
    """
    if len(domains) > MAX_DOMAINS:
        raise UserError(
            f"There are more than {MAX_DOMAINS} domains ({', '.join(sorted(domains)[:3])}, ...); give a "
            "--domain_field or folders with fewer names, or --domain=NAME."
        )


def is_done(job: ShardJob) -> bool:
    """Return whether a shard's part is complete and unchanged."""
    files = (read_report(job.done) or {}).get("files", {})
    return files.keys() == set(PART) and all(
        is_same(job.part.with_suffix(suffix), *written) for suffix, written in files.items()
    )


@dataclasses.dataclass(frozen=True)
class TextJob:
    """Compare a shard's text with the hash recorded when its blocks were made.

    `job` made the blocks, `out` is the block directory, and `done` is an existing file.
    """

    job: ShardJob
    sha256: str
    out: Path
    done: Path

    @property
    def name(self) -> str:
        """The shard name."""
        return self.job.name

    def counts(self) -> dict[str, int]:
        """Return the finished job's work, in the units of `progress.count`."""
        return {"source": self.job.shard.size}


def compare_text(text: TextJob) -> None:
    """Run a `TextJob`; raise `UserError` if the text differs."""
    job, text_hash = text.job, TextHash()
    skipped = shards.Skipped(job.shard.name)
    for document in shards.documents(
        job.shard, job.domains, skipped, layout=job.layout, on_read=lambda n_bytes: count(source=n_bytes)
    ):
        text_hash.add(document)
    if text_hash.hex() != text.sha256:
        raise UserError(
            f"The text of {job.shard.url} has changed since it was prepared in {text.out}. Restore the text, or "
            f"delete {text.out} or give another --out to prepare it again."
        )
