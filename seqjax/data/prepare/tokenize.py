"""Converts shards to parts, the tokens of every document of one shard.

A *part* holds one shard. `NAME.bin` has the tokens of its domains one after the other. `NAME.npz` has the lengths of
their documents and, where some will be held out, their hashes and bytes. `NAME.sources.npz` has the sources of the
documents, with the domain instead of SPLIT/DOMAIN (seqjax/data/document_sources.py). `NAME.json` has their counts and
the checksums of the other files; it is written last and marks the shard as done.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import numpy as np

from seqjax.data import document_index, document_sources, hold_out, shards
from seqjax.data.layout import SLIMPAJAMA, Document, Layout, ordered
from seqjax.data.prepare.progress import count
from seqjax.data.prepare.reports import cannot_write, is_same, read_report, write_report
from seqjax.data.tokenizer import BATCH_CHARS, MIXTRAL_SHA256, ByteTokenizer, Tokenizer, id_dtype, load_tokenizer
from seqjax.utils import UserError, measure, replacing

HISTOGRAM = 24  # bins: documents by log2 of their token count
MAX_DOMAINS = 1000
SOURCES = ".sources.npz"
PART = (".bin", ".npz", SOURCES)  # files of a part, beside its report


@dataclasses.dataclass(frozen=True)
class ShardJob:
    """Tokenise `shard` into `part` (.bin, .npz, .sources.npz and .json).

    `domains` are those to keep, or empty for all; `hold_out` says that some documents will be held out by their hash.
    """

    shard: shards.Shard
    part: Path
    tokenizer: str
    tokenizer_path: str
    domains: tuple[str, ...]
    layout: Layout = SLIMPAJAMA
    hold_out: bool = False
    min_tokens: int = 0
    max_tokens: int = 0
    strict: bool = False

    @property
    def name(self) -> str:
        """The name of the shard."""
        return self.shard.name

    @property
    def done(self) -> Path:
        """The report that marks the part as complete."""
        return self.part.with_suffix(".json")

    def counts(self) -> dict[str, int]:
        """Return the work of the job when it is done, in the units of `progress.count`."""
        domains = (read_report(self.done) or {}).get("domains", {}).values()
        tokens, text = (sum(counts[key] for counts in domains) for key in ("tokens", "bytes"))
        return {"tokens": tokens, "text": text, "source": self.shard.size}


class _DomainTokens:
    """The documents of one domain in one shard, as tokens."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.sizes: list[int] = []  # bytes
        self.hashes: list[int] = []  # if some will be held out
        self.sources: list[int] = []  # indices in the names
        self.names = document_sources.Names()

    def add(self, ids: np.ndarray, *, size: int, source: str, tokenizer: Tokenizer) -> None:
        """Append BOS + document + EOS."""
        self.arrays += [np.array([tokenizer.bos]), ids, np.array([tokenizer.eos])]
        self.lengths.append(len(ids) + 2)
        self.sizes.append(size)
        self.sources.append(self.names.index(source))


def histogram(lengths: np.ndarray) -> list[int]:
    """Return the number of documents by log2 of their tokens, from their lengths with BOS and EOS."""
    bits = [min(int(n - 2).bit_length(), HISTOGRAM - 1) for n in lengths]
    return np.bincount(bits, minlength=HISTOGRAM).tolist()


def tokenize_shard(job: ShardJob) -> None:
    """Run a `ShardJob`; raise `UserError` if the disk is full and, if strict, for the first bad line."""
    tokenizer = load_tokenizer(job.tokenizer, job.tokenizer_path)
    dtype = id_dtype(tokenizer.vocab_size)
    # Whether the bytes of its tokens are those of the text, which is certain for these two.
    unproven = tokenizer.hash not in (ByteTokenizer.hash, MIXTRAL_SHA256)
    per_domain: dict[str, _DomainTokens] = {}
    skipped = shards.Skipped(job.shard.name, strict=job.strict)
    n_too_short = by_tokens = read = 0
    batch: list[Document] = []

    def flush() -> None:
        nonlocal n_too_short, by_tokens, read
        tokens = text = 0
        for document, ids in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
            text += (size := len(document.text.encode()))
            tokens += len(ids) + 2
            if unproven:
                by_tokens += int(tokenizer.n_bytes[ids].sum()) - (tokenizer.adds_space and len(ids) > 0)
                read += size
            if len(ids) < job.min_tokens:
                n_too_short += 1
                continue
            kept = per_domain.setdefault(document.domain, _DomainTokens())
            kept.add(ids[: job.max_tokens or None], size=size, source=document.source, tokenizer=tokenizer)
            if job.hold_out:
                kept.hashes.append(hold_out.text_hash(document.text))
        require_few(per_domain)
        count(tokens=tokens, text=text)
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
    }
    if unproven:
        report["token_bytes"] = {"text": read, "by_tokens": by_tokens}
    try:
        with replacing(job.part.with_suffix(".bin")) as file:
            for tokens in used.values():
                for array in tokens.arrays:
                    file.write(array.astype(dtype, copy=False).tobytes())
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
        report["files"] = {suffix: measure(job.part.with_suffix(suffix)) for suffix in PART}
        write_report(job.done, report)
    except OSError as error:
        raise cannot_write(job.part, error) from error


def require_few(domains: Collection[str]) -> None:
    """Raise `UserError` for so many domains that they must be a mistake; each has files of its own."""
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
