"""Packs parts into files of blocks: plans which tokens each file holds, and writes one file per job.

Block files are cut from the parts of a domain in the order of the shards, as if they were one stream, so the result
does not depend on the number of processes or on when they are killed.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from seqjax.data import blocks
from seqjax.data.prepare.progress import count
from seqjax.data.prepare.reports import cannot_write, is_same, read_report
from seqjax.data.prepare.split import Portion, Segment
from seqjax.errors import UserError
from seqjax.files import measure, write_json

READ_TOKENS = 1 << 22


@dataclasses.dataclass(frozen=True)
class FileJob:
    """Write `path` from `segments` (file, first token, tokens) with `block` tokens per record, and then `done`.

    Tokens are `dtype` in the parts and in the records.
    """

    path: Path
    done: Path
    segments: tuple[Segment, ...]
    block: int
    dtype: np.dtype = blocks.DTYPE

    @property
    def name(self) -> str:
        """The path of the file."""
        return str(self.path)

    def counts(self) -> dict[str, int]:
        """Return the work of the job when it is done, in the units of `progress.count`."""
        return {"source": sum(tokens for _, _, tokens in self.segments)}


Planned = tuple[str, str, FileJob]  # split, domain, job


def plan_files(
    out: Path, parts: Path, portions: Sequence[Portion], *, block: int, dtype: np.dtype = blocks.DTYPE
) -> list[Planned]:
    """Return (split, domain, job) of every file of blocks; the job says which tokens of which parts it holds."""
    streams: dict[tuple[str, str], list[Segment]] = {}
    for portion in portions:
        streams.setdefault((portion.split, portion.domain), []).extend(portion.segments)
    files: list[Planned] = []
    for (split, domain), segments in sorted(streams.items()):
        total = sum(tokens for _, _, tokens in segments) // block * block
        size = blocks.MAX_RECORDS * block
        for index, start in enumerate(range(0, total, size)):
            name = f"{split}/{domain}-{index:05d}.array_record"
            pieces = cut(segments, start, min(start + size, total))
            done = parts / f"{split}-{domain}-{index:05d}.json"
            job = FileJob(path=out / name, done=done, segments=pieces, block=block, dtype=dtype)
            files.append((split, domain, job))
    return files


def cut(segments: list[Segment], start: int, stop: int) -> tuple[Segment, ...]:
    """Return the segments of the range [start, stop) of the stream that the given segments form."""
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
        digest = blocks.write_records(job.path, _rows(job))
        records = sum(tokens for _, _, tokens in job.segments) // job.block
        size, crc = measure(job.path)
        write_json(job.done, {"sha256": digest, "blocks": records, "bytes": size, "crc32": crc})
    except OSError as error:
        raise cannot_write(job.path, error) from error
    count(**job.counts())


def is_written(job: FileJob) -> bool:
    """Return whether the file of a job is there and still the one that was written."""
    report = read_report(job.done)
    return report is not None and is_same(job.path, report.get("bytes"), report.get("crc32"))


def _rows(job: FileJob) -> Iterator[np.ndarray]:
    buffer = np.empty(0, job.dtype)
    for path, first, tokens in job.segments:
        for start in range(first, first + tokens, READ_TOKENS):
            size = min(READ_TOKENS, first + tokens - start)
            ids = np.fromfile(path, job.dtype, size, offset=start * job.dtype.itemsize)
            if len(ids) != size:
                raise UserError(f"{path} was cut while it was read; run the same command again, and it is made again.")
            buffer = np.concatenate([buffer, ids])
            n_whole = len(buffer) // job.block * job.block
            yield buffer[:n_whole].reshape(-1, job.block)
            buffer = buffer[n_whole:]
