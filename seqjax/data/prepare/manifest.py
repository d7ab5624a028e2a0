"""The manifest of prepared blocks, the lengths of their documents, and the table printed by the command."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data import blocks, document_index, shards, slimpajama
from seqjax.data.prepare.pack import Planned
from seqjax.data.prepare.reports import read_report
from seqjax.data.prepare.tokenize import HISTOGRAM, ShardJob


def make_manifest(
    settings: dict[str, Any],
    reports: list[dict[str, Any]],
    jobs: list[ShardJob],
    plan: list[Planned],
    out: Path,
) -> dict[str, Any]:
    """Return the manifest: settings, counts per split and domain, files with their hashes, and skipped lines."""
    splits: dict[str, dict[str, Any]] = {}
    reasons: Counter[str] = Counter()
    for job, report in zip(jobs, reports, strict=True):
        reasons.update(report["skipped"]["by_reason"])
        for domain, counts in report["domains"].items():
            entry = splits.setdefault(job.shard.split, {}).setdefault(
                domain,
                {
                    **dict.fromkeys(("documents", "bytes", "tokens", "blocks"), 0),
                    "documents_by_log2_tokens": [0] * HISTOGRAM,
                    "files": [],
                },
            )
            for key in ("documents", "bytes", "tokens"):
                entry[key] += counts[key]
            both = zip(entry["documents_by_log2_tokens"], counts["documents_by_log2_tokens"], strict=True)
            entry["documents_by_log2_tokens"] = [a + b for a, b in both]
    for split, domain, job in plan:
        done = read_report(job.done) or {}
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
            "first": first[: 10 * shards.MAX_NAMED],
        },
    }


def document_lengths(jobs: list[ShardJob]) -> dict[str, np.ndarray]:
    """Return the token counts of all documents, "SPLIT/DOMAIN" -> uint32, in the order in which blocks hold them."""
    lengths: dict[str, list[np.ndarray]] = {}
    for job in jobs:
        for domain, part in document_index.read(job.part.with_suffix(".npz")).items():
            lengths.setdefault(f"{job.shard.split}/{domain}", []).append(part)
    return {key: np.concatenate(parts) for key, parts in sorted(lengths.items())}


def summary(manifest: dict[str, Any]) -> str:
    """Return a table of the manifest for the terminal."""
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
