"""Make the manifest of prepared blocks, the document arrays and the printed table."""

import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data import manifests, shards
from seqjax.data.layout import ordered
from seqjax.data.prepare.pack import Planned, Portion
from seqjax.data.prepare.reports import read_report, skipped_lines
from seqjax.data.prepare.tokenize import HISTOGRAM
from seqjax.data.splits import SPLITS
from seqjax.errors import UserError


def make_manifest(
    settings: dict[str, Any],
    reports: list[dict[str, Any]],
    portions: Sequence[Portion],
    plan: list[Planned],
    out: Path,
) -> dict[str, Any]:
    """Return the manifest.

    It holds the settings, counts per split and domain, files with their hashes, and skipped lines.
    """
    splits: dict[str, dict[str, Any]] = {}
    for portion in portions:
        entry = splits.setdefault(portion.split, {}).setdefault(
            portion.domain,
            {
                **dict.fromkeys(("documents", "bytes", "tokens", "blocks"), 0),
                "documents_by_log2_tokens": [0] * HISTOGRAM,
                "files": [],
            },
        )
        for key in ("documents", "bytes", "tokens"):
            entry[key] += portion.counts[key]
        both = zip(entry["documents_by_log2_tokens"], portion.counts["documents_by_log2_tokens"], strict=True)
        entry["documents_by_log2_tokens"] = [a + b for a, b in both]
    for split, domain, job in plan:
        done = read_report(job.done) or {}
        entry = splits[split][domain]
        entry["files"].append({"path": job.path.relative_to(out).as_posix(), **done})
        entry["blocks"] += done["blocks"]
    for entries in splits.values():
        for entry in entries.values():
            entry["tokens_unused"] = entry["tokens"] - entry["blocks"] * settings["block"]
    reasons, contents = skipped_lines(reports)
    first = [line for report in reports for line in report["skipped"]["first"]]
    skipped = {
        "count": reasons.total(),
        "by_reason": dict(sorted(reasons.items())),
        "first": first[: 10 * shards.MAX_NAMED],
    }
    if contents:
        skipped["found"] = {reason: dict(counts.most_common(shards.MAX_NAMED)) for reason, counts in contents.items()}
    bytes_read = [report["token_bytes"] for report in reports if "token_bytes" in report]
    token_bytes = {key: sum(each[key] for each in bytes_read) for key in ("text", "by_tokens")}
    return {
        "format": manifests.FORMAT,
        **settings,
        **({"token_bytes": token_bytes} if bytes_read else {}),
        "splits": splits,
        "text_sha256": [report["text_sha256"] for report in reports],
        "beside": manifests.file_checksums(out),
        "too_short": sum(report["too_short"] for report in reports),
        "skipped": skipped,
    }


def document_lengths(portions: Sequence[Portion]) -> dict[str, np.ndarray]:
    """Return all documents' token counts, "SPLIT/DOMAIN" -> uint32.

    Documents are in block order.
    """
    return _concatenated((portion, portion.lengths) for portion in portions)


def source_indices(portions: Sequence[Portion], domains: Collection[str]) -> dict[str, np.ndarray]:
    """Return the document sources of `domains`, "SPLIT/DOMAIN" -> uint32.

    Documents are in block order.
    """
    return _concatenated((portion, portion.sources) for portion in portions if portion.domain in domains)


def _concatenated(arrays: Iterable[tuple[Portion, np.ndarray]]) -> dict[str, np.ndarray]:
    of_key: dict[str, list[np.ndarray]] = {}
    for portion, array in arrays:
        of_key.setdefault(f"{portion.split}/{portion.domain}", []).append(array)
    return {key: np.concatenate(parts) for key, parts in sorted(of_key.items())}


def summary(manifest: dict[str, Any]) -> str:
    """Return the manifest as a table for the terminal."""
    names = ordered({domain for entries in manifest["splits"].values() for domain in entries})
    width = max(15, *(len(name) + 2 for name in names))
    lines = [f"{'split':<12}{'domain':<{width}}{'documents':>12}{'MB':>10}{'tokens':>16}{'blocks':>10}"]
    for split in SPLITS:
        for domain in names:
            entry = manifest["splits"].get(split, {}).get(domain)
            if entry:
                lines.append(
                    f"{split:<12}{domain:<{width}}{entry['documents']:>12,}{entry['bytes'] / 1e6:>10.1f}"
                    f"{entry['tokens']:>16,}{entry['blocks']:>10,}"
                )
    if "validation" in manifest:
        held = manifest["splits"].get("validation", {})
        without = [name for name in names if not held.get(name, {}).get("blocks")]
        if without:
            lines.append(
                f"No validation block of {', '.join(without)}: too few documents to hold one out. Such a domain can be "
                "evaluated only if it is not trained on."
            )
    for split, n in manifest.get("in_two_splits", {}).items():
        lines.append(f"WARNING: {n} texts of the {split} split are also in the train split.")
    if "token_bytes" in manifest:
        lines += _token_bytes(**manifest["token_bytes"])
    skipped = manifest["skipped"]
    if skipped["count"]:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in skipped["by_reason"].items())
        lines.append(f"{skipped['count']} lines skipped ({reasons}), the first:")
        lines += [f"  {line['file']}:{line['line']}: {line['reason']}" for line in skipped["first"][:5]]
    lines.append(f"manifest hash {manifests.manifest_hash(manifest)[:16]}")
    return "\n".join(lines)


def next_step(manifest: dict[str, Any], out: str | Path, *, tokenizer_path: str = "") -> str:
    """Return the command that trains a first model on the blocks in `out`.

    If no model can be trained on them, the text gives the reason.
    """
    # These imports load JAX, and worker processes do not need it.
    from seqjax.config import DataConfig
    from seqjax.data import regimes

    tokenizer, seq_len = manifest["tokenizer"], manifest["block"] - 1
    size = "110m" if (tokenizer["name"], seq_len) == ("mixtral", 2048) else "demo"
    settings: dict[str, Any] = {"data.path": out}
    if size == "demo" or tokenizer_path:
        settings["data.tokenizer"] = tokenizer["name"]
    if tokenizer_path:
        settings["data.tokenizer_path"] = tokenizer_path
    if size == "demo":
        settings |= {"model.vocab_size": -(-tokenizer["vocab_size"] // 8) * 8, "train.seq_len": seq_len}
    train, held = (
        {domain for domain, entry in manifest["splits"].get(split, {}).items() if entry["blocks"]}
        for split in ("train", "validation")
    )
    if not train:
        return f"It has no training text. To evaluate a run on it: --config.eval.path={shlex.quote(str(out))}"
    try:
        train_domains, evaluated = regimes.choose(DataConfig(), train=train, evaluate=train | held, where="", fix="")
        chosen = evaluated
    except UserError:  # The regime cannot choose among these domains: train on the largest one, test on all.
        entries = manifest["splits"]["train"]
        train_domains = (max(sorted(train & held or train), key=lambda name: entries[name]["tokens"]),)
        settings["data.train_domains"] = list(train_domains)
        evaluated, chosen = (*train_domains, *ordered((train | held) - {*train_domains})), ()
    evaluated = tuple(name for name in evaluated if name in held or name not in train_domains)
    if not evaluated:
        return (
            "It has no validation text, which training needs. Prepare two documents or more into another --out with "
            "a larger --validation, such as 0.5."
        )
    if evaluated != chosen:
        settings["data.eval_domains"] = list(evaluated)
    overrides = [f"--config.{key}={shlex.quote(_shown(value))}" for key, value in settings.items()]
    return "To train on it:\n  " + " ".join([f"seqjax train --config=transformer_pp:{size},limited", *overrides])


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _token_bytes(*, text: int, by_tokens: int) -> list[str]:
    """Return a warning if the tokens' byte counts differ from the text.

    Bits per byte assume that they are equal.
    """
    if by_tokens == text:
        return []
    if not by_tokens:
        return ["The byte counts of this tokenizer's ids are unknown, so bits per byte will not be reported."]
    off = 100 * (by_tokens / text - 1)
    return [
        f"The tokens represent {by_tokens:,} bytes, the text has {text:,} ({off:+.2g}%): the tokenizer changes the "
        "text (normalisation, unknown characters, special tokens), and bits per byte have the same error."
    ]
