"""Packs parts into files of blocks: plans which tokens each file holds, and writes one file per job.

Block files are cut from the parts of a domain in the order of the shards, as if they were one stream, so the result
does not depend on the number of processes or on when they are killed.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data import blocks, slimpajama
from seqjax.data.prepare.progress import count
from seqjax.data.prepare.reports import cannot_write
from seqjax.data.prepare.tokenize import ShardJob
from seqjax.files import write_json

READ_TOKENS = 1 << 22


@dataclasses.dataclass(frozen=True)
class FileJob:
    """Write `path` from `segments` (file, first token, tokens) with `block` tokens per record, and then `done`."""

    path: Path
    done: Path
    segments: tuple[tuple[Path, int, int], ...]
    block: int


Planned = tuple[str, str, FileJob]  # split, domain, job


def plan_files(
    out: Path, parts: Path, jobs: list[ShardJob], reports: list[dict[str, Any]], *, block: int
) -> list[Planned]:
    """Return (split, domain, job) of every file of blocks; the job says which tokens of which parts it holds."""
    streams: dict[tuple[str, str], list[tuple[Path, int, int]]] = {}
    for job, report in zip(jobs, reports, strict=True):
        offset = 0
        for domain in slimpajama.NAMES:  # the order of the domains within a part
            if domain in report["domains"]:
                tokens = report["domains"][domain]["tokens"]
                stream = streams.setdefault((job.shard.split, domain), [])
                stream.append((job.part.with_suffix(".bin"), offset, tokens))
                offset += tokens
    files: list[Planned] = []
    for (split, domain), segments in sorted(streams.items()):
        total = sum(tokens for _, _, tokens in segments) // block * block
        size = blocks.MAX_RECORDS * block
        for index, start in enumerate(range(0, total, size)):
            name = f"{split}/{domain}-{index:05d}.array_record"
            pieces = cut(segments, start, min(start + size, total))
            done = parts / f"{split}-{domain}-{index:05d}.json"
            job = FileJob(path=out / name, done=done, segments=pieces, block=block)
            files.append((split, domain, job))
    return files


def cut(segments: list[tuple[Path, int, int]], start: int, stop: int) -> tuple[tuple[Path, int, int], ...]:
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
        job.done.parent.mkdir(parents=True, exist_ok=True)
        write_json(job.done, {"sha256": digest, "blocks": records})
    except OSError as error:
        raise cannot_write(job.path, error) from error
    count(source=sum(tokens for _, _, tokens in job.segments))


def _rows(job: FileJob) -> Iterator[np.ndarray]:
    buffer = np.empty(0, blocks.DTYPE)
    for path, first, tokens in job.segments:
        for start in range(first, first + tokens, READ_TOKENS):
            size = min(READ_TOKENS, first + tokens - start)
            ids = np.fromfile(path, blocks.DTYPE, size, offset=start * blocks.DTYPE.itemsize)
            buffer = np.concatenate([buffer, ids])
            n_whole = len(buffer) // job.block * job.block
            yield buffer[:n_whole].reshape(-1, job.block)
            buffer = buffer[n_whole:]
