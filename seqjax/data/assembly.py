"""From finished parts to files of blocks: which tokens each file holds, and the manifest that describes them."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data import blocks, document_index, documents, shard_jobs, shards, slimpajama

Planned = tuple[str, str, shard_jobs.FileJob]  # split, domain, job


def plan_files(
    out: Path, parts: Path, jobs: list[shard_jobs.ShardJob], reports: list[dict[str, Any]], *, block: int
) -> list[Planned]:
    """(split, domain, job) of every file of blocks: which tokens of which parts it holds."""
    streams: dict[tuple[str, str], list[tuple[Path, int, int]]] = {}
    for job, report in zip(jobs, reports, strict=True):
        offset = 0
        for domain in slimpajama.NAMES:  # the order in which a part holds them
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
            job = shard_jobs.FileJob(path=out / name, done=done, segments=pieces, block=block)
            files.append((split, domain, job))
    return files


def cut(segments: list[tuple[Path, int, int]], start: int, stop: int) -> tuple[tuple[Path, int, int], ...]:
    """The part [start, stop) of the stream that the segments make together."""
    cut, position = [], 0
    for path, offset, tokens in segments:
        first, last = max(start, position), min(stop, position + tokens)
        if first < last:
            cut.append((path, offset + first - position, last - first))
        position += tokens
    return tuple(cut)


def make_manifest(
    settings: dict[str, Any],
    reports: list[dict[str, Any]],
    jobs: list[shard_jobs.ShardJob],
    plan: list[Planned],
    out: Path,
) -> dict[str, Any]:
    """The manifest: settings, counts per split and domain, files with their hashes, skipped lines."""
    splits: dict[str, dict[str, Any]] = {}
    reasons: Counter[str] = Counter()
    for job, report in zip(jobs, reports, strict=True):
        reasons.update(report["skipped"]["by_reason"])
        for domain, counts in report["domains"].items():
            entry = splits.setdefault(job.shard.split, {}).setdefault(
                domain,
                {
                    **dict.fromkeys(("documents", "bytes", "tokens", "blocks"), 0),
                    "documents_by_log2_tokens": [0] * shard_jobs.HISTOGRAM,
                    "files": [],
                },
            )
            for key in ("documents", "bytes", "tokens"):
                entry[key] += counts[key]
            both = zip(entry["documents_by_log2_tokens"], counts["documents_by_log2_tokens"], strict=True)
            entry["documents_by_log2_tokens"] = [a + b for a, b in both]
    for split, domain, job in plan:
        done = shard_jobs.read_report(job.done) or {}
        entry = splits[split][domain]
        entry["files"].append({"path": job.path.relative_to(out).as_posix(), **done})
        entry["blocks"] += done["blocks"]
    for entries in splits.values():
        for entry in entries.values():
            entry["tokens_unused"] = entry["tokens"] - entry["blocks"] * settings["block"]
    first = [line for report in reports for line in report["skipped"]["first"]]
    return {
        "format": blocks.FORMAT,
        **settings,
        "splits": splits,
        "too_short": sum(report["too_short"] for report in reports),
        "skipped": {
            "count": reasons.total(),
            "by_reason": dict(sorted(reasons.items())),
            "first": first[: 10 * documents.MAX_NAMED],
        },
    }


def document_lengths(jobs: list[shard_jobs.ShardJob]) -> dict[str, np.ndarray]:
    """Tokens of every document, "SPLIT/DOMAIN" -> uint32, in the order in which the blocks hold them."""
    lengths: dict[str, list[np.ndarray]] = {}
    for job in jobs:
        for domain, part in document_index.read(job.part.with_suffix(".npz")).items():
            lengths.setdefault(f"{job.shard.split}/{domain}", []).append(part)
    return {key: np.concatenate(parts) for key, parts in sorted(lengths.items())}


def summary(manifest: dict[str, Any]) -> str:
    """A table of the manifest for the terminal."""
    lines = [f"{'split':<12}{'domain':<15}{'documents':>12}{'MB':>10}{'tokens':>16}{'blocks':>10}"]
    for split in shards.SPLITS:
        for domain in slimpajama.NAMES:
            entry = manifest["splits"].get(split, {}).get(domain)
            if entry:
                lines.append(
                    f"{split:<12}{domain:<15}{entry['documents']:>12,}{entry['bytes'] / 1e6:>10.1f}"
                    f"{entry['tokens']:>16,}{entry['blocks']:>10,}"
                )
    skipped = manifest["skipped"]
    if skipped["count"]:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in skipped["by_reason"].items())
        lines.append(f"{skipped['count']} lines skipped ({reasons}), the first:")
        lines += [f"  {line['file']}:{line['line']}: {line['reason']}" for line in skipped["first"][:5]]
    lines.append(f"manifest hash {blocks.manifest_hash(manifest)[:16]}")
    return "\n".join(lines)
