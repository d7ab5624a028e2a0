"""Write and read job reports, and derive errors from them."""

import errno
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqjax.data.layout import Layout
from seqjax.errors import UserError, nearest
from seqjax.files import measure, write_json
from seqjax.reading import read_json

CHECK = "report_crc32"  # key of the checksum over the remaining report
# Fields that preparation settings and manifests share.
SETTINGS = {
    "tokenizer?": {"name": str, "sha256": str},
    "sources?": [{"name": str, "split": str, "size": int}],
}
SHOWN = 6  # items listed in a message


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a finished job's report."""
    write_json(path, report | {CHECK: _crc(report)})


def read_report(path: Path) -> dict[str, Any] | None:
    """Return a finished job's report.

    None if the job has not finished or the report is damaged; the job then runs again.
    """
    try:
        report = read_json(path, {CHECK: int})
    except UserError:
        return None
    return report if report.pop(CHECK) == _crc(report) else None


def _crc(report: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(report, sort_keys=True).encode())


def read_settings(path: Path) -> dict[str, Any] | None:
    """Return preparation settings from their file or from a manifest.

    None if the file is missing or damaged.
    """
    try:
        return read_json(path, SETTINGS)
    except UserError:
        return None


def is_same(path: Path, size: int | None, crc: int | None) -> bool:
    """Return whether a file has the size and CRC-32 in its report."""
    try:
        return path.stat().st_size == size and measure(path) == (size, crc)
    except FileNotFoundError:
        return False


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the error for a part or block file that could not be written."""
    why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return UserError(
        f"Cannot write {path}: {why}. Finished shards are kept: free some disk space (or move the directory) and run "
        "the same command again."
    )


def skipped_lines(reports: Sequence[dict[str, Any]]) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Return skipped line counts by reason, and the actual content by reason."""
    reasons: Counter[str] = Counter()
    contents: dict[str, Counter[str]] = {}
    for report in reports:
        reasons.update(report["skipped"]["by_reason"])
        for reason, counts in report["skipped"].get("found", {}).items():
            contents.setdefault(reason, Counter()).update(counts)
    return reasons, dict(sorted(contents.items()))


def require_documents(
    reports: Sequence[dict[str, Any]],
    *,
    source: str,
    layout: Layout,
    domains: Sequence[str],
    min_tokens: int,
    block: int,
) -> None:
    """Raise `UserError` if there is no block of text or a domain is absent.

    The error lists the content found. `domains` are the requested domains, or empty for all.
    """
    documents: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    tokens = 0
    for report in reports:
        documents.update({domain: counts["documents"] for domain, counts in report["domains"].items()})
        tokens += sum(counts["tokens"] for counts in report["domains"].values())
        elsewhere.update(report["skipped"].get("elsewhere", {}))
    short = sum(report["too_short"] for report in reports)
    dropped = f" {short} documents have fewer than --min_tokens={min_tokens}." if short else ""
    absent = [domain for domain in domains if not documents[domain]]
    if absent and (documents or elsewhere):
        hint = nearest(absent[0], documents | elsewhere)
        raise UserError(f"--domains: {source} has no document of {', '.join(absent)}.{dropped}{hint}")
    if not documents:
        raise UserError(f"{source}: nothing was read.{dropped} {_read_summary(reports)}{_advice(reports, layout)}")
    if tokens < block:
        raise UserError(
            f"{source}: the {documents.total()} documents have {tokens} tokens together ({_listed(documents)}), less "
            f"than one block of {block} tokens.{dropped} Give more text, or a smaller --seq_len."
        )


def _read_summary(reports: Sequence[dict[str, Any]]) -> str:
    reasons, contents = skipped_lines(reports)
    lines = sum(report["skipped"].get("lines", 0) for report in reports)
    texts = [
        f"{n} {reason}" + (f" ({_listed(contents[reason])})" if reason in contents else "")
        for reason, n in reasons.most_common()
    ]
    return f"{len(reports)} files with {lines} lines" + (f", skipped: {'; '.join(texts)}." if texts else ".")


def _listed(counts: Counter[str]) -> str:
    shown = [f"{name}: {n}" for name, n in counts.most_common(SHOWN)]
    return ", ".join(shown) + (f", and {len(counts) - SHOWN} more" if len(counts) > SHOWN else "")


def _advice(reports: Sequence[dict[str, Any]], layout: Layout) -> str:
    """Return an option that may help, as the end of a message."""
    reasons, _ = skipped_lines(reports)
    if any(reason.startswith(f"no {layout.text_field}") or reason == "no text" for reason in reasons):
        return f" The text is expected in the field {layout.text_field}: give --text_field=NAME."
    if any(reason.endswith(", not text") for reason in reasons):
        return f" Convert {layout.text_field} to strings, or name another field with --text_field=NAME."
    if layout.is_slimpajama and reasons:
        return (
            " For text from another source give its domain: --domain=NAME, --domain_field=FIELD or "
            "--domain_from=folder."
        )
    if layout.domain_from and reasons["no folder"]:
        return " The files are not in folders below the source: give --domain=NAME."
    if layout.domain_field and reasons:
        return " Give another --domain_field, or --domain=NAME."
    return ""
