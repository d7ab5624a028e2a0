"""Divides the documents of all parts over domains and splits.

The split of a document is that of its shard. Where no shard belongs to a validation split, documents are held out by a
hash of their text (`seqjax.data.hold_out`).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data import document_index, hold_out
from seqjax.data.layout import ordered
from seqjax.data.prepare.tokenize import ShardJob, histogram

Segment = tuple[Path, int, int]  # file, first token, tokens


@dataclasses.dataclass(frozen=True)
class Portion:
    """What one part gives to a domain and split: its documents' lengths in tokens, their counts, and where they are."""

    split: str
    domain: str
    lengths: np.ndarray
    counts: dict[str, Any]
    segments: tuple[Segment, ...]


def portions(
    jobs: Sequence[ShardJob], reports: Sequence[dict[str, Any]], *, validation: float, block: int
) -> list[Portion]:
    """Return what the parts of finished `jobs` hold, in order; `validation` is the share of documents to hold out."""
    arrays = [document_index.read(job.part.with_suffix(".npz")) for job in jobs]
    limits = _limits(arrays, validation=validation, block=block)
    found = []
    for job, report, array in zip(jobs, reports, arrays, strict=True):
        path = job.part.with_suffix(".bin")
        first = 0
        for domain in ordered(report["domains"]):  # the order within a part
            counts, lengths = report["domains"][domain], array[domain]
            if not job.hold_out:
                segments = ((path, first, counts["tokens"]),)
                found.append(Portion(job.shard.split, domain, lengths, counts, segments))
            else:
                held = array[f"{domain}/hash"] < limits[domain]
                for split, chosen in (("train", ~held), ("validation", held)):
                    if chosen.any():
                        sizes = array[f"{domain}/bytes"][chosen]
                        segments = _segments(path, first, lengths, chosen)
                        found.append(Portion(split, domain, lengths[chosen], _counts(lengths[chosen], sizes), segments))
            first += counts["tokens"]
    return found


def _limits(arrays: Sequence[dict[str, np.ndarray]], *, validation: float, block: int) -> dict[str, int]:
    """Return, per domain with hashes, the number below which a hash puts a document into the validation split."""
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
    """Return where the chosen documents are; neighbours share a segment."""
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
