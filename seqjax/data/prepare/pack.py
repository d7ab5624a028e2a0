"""Divide documents over domains and splits, and pack them into block files.

Each job packs one file. A document has the split of its shard. If no shard belongs to a validation split, documents are
held out by a hash of their text (`seqjax.data.hold_out`). A domain's parts form one stream in shard order, and block
files are cut from it. The result therefore does not depend on the number of processes or on interruptions.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data import blocks, document_index, document_sources, hold_out, manifests
from seqjax.data.layout import ordered
from seqjax.data.prepare.progress import count
from seqjax.data.prepare.reports import cannot_write, is_same, read_report, write_report
from seqjax.data.prepare.tokenize import SOURCES, TEXTS, ShardJob, histogram
from seqjax.errors import UserError
from seqjax.files import measure

Segment = tuple[Path, int, int]  # file, first token, tokens


@dataclasses.dataclass(frozen=True)
class Portion:
    """The documents of one part in one domain and split.

    It holds their lengths in tokens, their sources (indices into the domain's names), counts and positions.
    """

    split: str
    domain: str
    lengths: np.ndarray
    sources: np.ndarray
    counts: dict[str, Any]
    segments: tuple[Segment, ...]


def portions(
    jobs: Sequence[ShardJob], reports: Sequence[dict[str, Any]], *, validation: float, block: int
) -> tuple[list[Portion], dict[str, document_sources.Names]]:
    """Return the content of finished jobs' parts, and source names per domain.

    The parts are in job order. `validation` is the share to hold out.
    """
    arrays = [document_index.read(job.part.with_suffix(".npz")) for job in jobs]
    held_from = [array for job, array in zip(jobs, arrays, strict=True) if job.hold_out]
    limits = _limits(held_from, validation=validation, block=block)
    out = []
    names: dict[str, document_sources.Names] = {}
    for job, report, array in zip(jobs, reports, arrays, strict=True):
        path = job.part.with_suffix(".bin")
        known = document_sources.read(job.part.with_suffix(SOURCES))
        first = 0
        for domain in ordered(report["domains"]):  # the token order within a part
            counts, lengths = report["domains"][domain], array[domain]
            of_domain, of_part = names.setdefault(domain, document_sources.Names()), np.arange(len(lengths))
            each = document_sources.names_of(known, domain, {domain: len(lengths)}, of_part)
            sources = np.array([of_domain.index(name) for name in each], np.uint32)
            if not job.hold_out:
                segments = ((path, first, counts["tokens"]),)
                out.append(Portion(job.shard.split, domain, lengths, sources, counts, segments))
            else:
                held = array[f"{domain}/hash"] < limits[domain]
                for split, chosen in (("train", ~held), ("validation", held)):
                    if chosen.any():
                        sizes = array[f"{domain}/bytes"][chosen]
                        segments = _segments(path, first, lengths, chosen)
                        of_split = _counts(lengths[chosen], sizes)
                        out.append(Portion(split, domain, lengths[chosen], sources[chosen], of_split, segments))
            first += counts["tokens"]
    return out, {domain: of_domain for domain, of_domain in names.items() if of_domain}


def lacks_a_split(portions: Sequence[Portion], *, validation: float, block: int) -> str:
    """Return an error text if a domain lacks a training or a validation block, or "".

    `validation` is the share to hold out; if it is 0, the result is "".
    """
    documents, tokens = Counter[str](), Counter[tuple[str, str]]()
    for portion in portions if validation else ():
        if portion.split in ("train", "validation"):
            documents[portion.domain] += len(portion.lengths)
            tokens[portion.domain, portion.split] += int(portion.lengths.sum(dtype=np.int64))
    for domain, n in documents.items():
        both = tokens[domain, "train"], tokens[domain, "validation"]
        if min(both) < block:
            shorter = ", lower --seq_len" if n > 1 else ""
            return (
                f"--validation={validation}: {domain} has {n} document{'s' * (n > 1)} with {sum(both):,} tokens, which "
                f"cannot be split into a training block and a validation block of {block:,} tokens. Add documents"
                f"{shorter}, or leave out --validation; the domain then has no validation text."
            )
    return ""


def in_two_splits(jobs: Sequence[ShardJob]) -> dict[str, int]:
    """Return how many validation or test texts are also training texts, by split.

    Texts held out by their hash are not counted: equal texts are in the same split.
    """
    of_split: dict[str, list[np.ndarray]] = {}
    for job in jobs:
        if job.shard.split != "train":
            of_split.setdefault(job.shard.split, []).append(_texts(job))
    held = {split: np.unique(np.concatenate(texts)) for split, texts in of_split.items()}
    seen = {split: np.zeros(len(texts), bool) for split, texts in held.items()}
    for job in jobs if held else ():
        if job.shard.split == "train":
            trained = _texts(job)
            for split, texts in held.items():
                seen[split] |= np.isin(texts, trained)
    return {split: int(is_duplicate.sum()) for split, is_duplicate in seen.items() if is_duplicate.any()}


def _texts(job: ShardJob) -> np.ndarray:
    return np.fromfile(job.part.with_suffix(TEXTS), "<u8")


def _limits(arrays: Sequence[dict[str, np.ndarray]], *, validation: float, block: int) -> dict[str, int]:
    """Return the hash limit per domain; documents with smaller hashes are held out."""
    domains = {key.removesuffix("/hash") for array in arrays for key in array if key.endswith("/hash")}
    return {
        domain: hold_out.limit(
            np.concatenate([array[f"{domain}/hash"] for array in arrays if domain in array]),
            np.concatenate([array[domain] for array in arrays if domain in array]).astype(np.int64),
            share=validation,
            block=block,
        )
        for domain in domains
    }


def _segments(path: Path, first: int, lengths: np.ndarray, chosen: np.ndarray) -> tuple[Segment, ...]:
    """Return the chosen documents' segments; adjacent documents share a segment."""
    bounds = first + np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(np.int8), [0]])))
    return tuple(
        (path, int(bounds[begin]), int(bounds[end] - bounds[begin]))
        for begin, end in zip(edges[::2], edges[1::2], strict=True)
    )


def _counts(lengths: np.ndarray, sizes: np.ndarray) -> dict[str, Any]:
    return {
        "documents": len(lengths),
        "bytes": int(sizes.sum(dtype=np.int64)),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "documents_by_log2_tokens": histogram(lengths),
    }


READ_TOKENS = 1 << 22


@dataclasses.dataclass(frozen=True)
class FileJob:
    """Write `path` from `segments` (file, first token, tokens), and then `done`.

    Each record has `block` tokens. Tokens have type `dtype` in parts and records.
    """

    path: Path
    done: Path
    segments: tuple[Segment, ...]
    block: int
    dtype: np.dtype = blocks.DTYPE

    @property
    def name(self) -> str:
        """The file path."""
        return str(self.path)

    def counts(self) -> dict[str, int]:
        """Return the finished job's work, in the units of `progress.count`."""
        return {"source": sum(tokens for _, _, tokens in self.segments)}


Planned = tuple[str, str, FileJob]  # split, domain, job


def plan_files(
    out: Path, parts: Path, portions: Sequence[Portion], *, block: int, dtype: np.dtype = blocks.DTYPE
) -> list[Planned]:
    """Return (split, domain, job) for every block file.

    The job lists the parts and tokens that the file holds.
    """
    streams: dict[tuple[str, str], list[Segment]] = {}
    for portion in portions:
        streams.setdefault((portion.split, portion.domain), []).extend(portion.segments)
    files: list[Planned] = []
    for (split, domain), segments in sorted(streams.items()):
        total = sum(tokens for _, _, tokens in segments) // block * block
        size = manifests.MAX_RECORDS * block
        for index, start in enumerate(range(0, total, size)):
            name = f"{split}/{domain}-{index:05d}.array_record"
            pieces = cut(segments, start, min(start + size, total))
            done = parts / f"{split}-{domain}-{index:05d}.json"
            job = FileJob(path=out / name, done=done, segments=pieces, block=block, dtype=dtype)
            files.append((split, domain, job))
    return files


def cut(segments: list[Segment], start: int, stop: int) -> tuple[Segment, ...]:
    """Return the segments for tokens [start, stop) of a stream of segments."""
    selected, position = [], 0
    for path, offset, tokens in segments:
        first, last = max(start, position), min(stop, position + tokens)
        if first < last:
            selected.append((path, offset + first - position, last - first))
        position += tokens
    return tuple(selected)


def write_file(job: FileJob) -> None:
    """Run a `FileJob`; raise `UserError` if the disk is full."""
    try:
        records = sum(tokens for _, _, tokens in job.segments) // job.block
        digest, sampled = blocks.write_records(job.path, _rows(job), sampled=blocks.to_sample(records))
        size, crc = measure(job.path)
        write_report(job.done, {"sha256": digest, "blocks": records, "bytes": size, "crc32": crc, "sampled": sampled})
    except OSError as error:
        raise cannot_write(job.path, error) from error
    count(**job.counts())


def is_written(job: FileJob) -> bool:
    """Return whether a job's file exists and is unchanged."""
    report = read_report(job.done)
    return report is not None and is_same(job.path, report.get("bytes"), report.get("crc32"))


def _rows(job: FileJob) -> Iterator[np.ndarray]:
    buffer = np.empty(0, job.dtype)
    for path, first, tokens in job.segments:
        for start in range(first, first + tokens, READ_TOKENS):
            size = min(READ_TOKENS, first + tokens - start)
            ids = np.fromfile(path, job.dtype, size, offset=start * job.dtype.itemsize)
            if len(ids) != size:
                raise UserError(f"{path}, a temporary file, was truncated; run the same command again to rebuild it.")
            buffer = np.concatenate([buffer, ids])
            n_complete = len(buffer) // job.block * job.block
            yield buffer[:n_complete].reshape(-1, job.block)
            buffer = buffer[n_complete:]
