"""The report of a finished job to the command, and the errors derived from reports."""

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

CHECK = "report_crc32"  # in a report, of the rest of it
# Of the settings of a preparation, and of its manifest.
SETTINGS = {
    "tokenizer?": {"name": str, "sha256": str},
    "sources?": [{"name": str, "split": str, "size": int}],
}
SHOWN = 6  # items of a kind in a message


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the report of a finished job."""
    write_json(path, report | {CHECK: _crc(report)})


def read_report(path: Path) -> dict[str, Any] | None:
    """Return the report of a finished job, or None if it has not finished or is damaged: the job is done again."""
    try:
        report = read_json(path, {CHECK: int})
    except UserError:
        return None
    return report if report.pop(CHECK) == _crc(report) else None


def _crc(report: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(report, sort_keys=True).encode())


def read_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of a preparation, in a file of its own or in the manifest, or None if it is damaged."""
    try:
        return read_json(path, SETTINGS)
    except UserError:
        return None


def is_same(path: Path, size: int | None, crc: int | None) -> bool:
    """Return whether a file has the length and the CRC-32 in its report."""
    try:
        return path.stat().st_size == size and measure(path) == (size, crc)
    except FileNotFoundError:
        return False


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the error for a part or a file of blocks that could not be written."""
    why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return UserError(
        f"Cannot write {path}: {why}. Finished shards are kept: free some disk space (or move the directory) and run "
        "the same command again."
    )


def skipped_lines(reports: Sequence[dict[str, Any]]) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Return the number of skipped lines by reason, and by reason their content instead of a document."""
    reasons: Counter[str] = Counter()
    found: dict[str, Counter[str]] = {}
    for report in reports:
        reasons.update(report["skipped"]["by_reason"])
        for reason, counts in report["skipped"].get("found", {}).items():
            found.setdefault(reason, Counter()).update(counts)
    return reasons, dict(sorted(found.items()))


def require_documents(
    reports: Sequence[dict[str, Any]],
    *,
    source: str,
    layout: Layout,
    domains: Sequence[str],
    min_tokens: int,
    block: int,
) -> None:
    """Raise `UserError` that lists the content found if there is no text for a block or a requested domain is absent.

    `domains` are those that the user named, or empty for all.
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
        raise UserError(f"{source}: nothing was read.{dropped} {_told(reports)}{_advice(reports, layout)}")
    if tokens < block:
        raise UserError(
            f"{source}: the {documents.total()} documents have {tokens} tokens together ({_listed(documents)}), less "
            f"than one block of {block}.{dropped} Give more text, or a smaller --seq_len."
        )


def _told(reports: Sequence[dict[str, Any]]) -> str:
    reasons, found = skipped_lines(reports)
    lines = sum(report["skipped"].get("lines", 0) for report in reports)
    texts = [
        f"{n} {reason}" + (f" ({_listed(found[reason])})" if reason in found else "")
        for reason, n in reasons.most_common()
    ]
    return f"{len(reports)} files with {lines} lines" + (f", skipped: {'; '.join(texts)}." if texts else ".")


def _listed(counts: Counter[str]) -> str:
    shown = [f"{name}: {n}" for name, n in counts.most_common(SHOWN)]
    return ", ".join(shown) + (f", and {len(counts) - SHOWN} more" if len(counts) > SHOWN else "")


def _advice(reports: Sequence[dict[str, Any]], layout: Layout) -> str:
    """Return the option that may help, as the end of a message."""
    reasons, _ = skipped_lines(reports)
    if any(reason.startswith(f"no {layout.text_field}") or reason == "no text" for reason in reasons):
        return f" The text is expected in the field {layout.text_field}: give --text_field=NAME."
    if any(reason.endswith(", not text") for reason in reasons):
        return f" Convert {layout.text_field} to strings, or name another field with --text_field=NAME."
    if layout.is_slimpajama and reasons:
        return (
            " For text of your own say what its domain is: --domain=NAME, --domain_field=FIELD or --domain_from=folder."
        )
    if layout.domain_from and reasons["no folder"]:
        return " The files are not in folders below the source: give --domain=NAME."
    if layout.domain_field and reasons:
        return " Give another --domain_field, or --domain=NAME."
    return ""
