"""Read and check the manifest of prepared blocks and its small files."""

import hashlib
import json
from pathlib import Path
from typing import Any

from seqjax import store
from seqjax.data import document_index, document_sources, stored_tokenizer
from seqjax.errors import UserError
from seqjax.files import measure
from seqjax.reading import check, parse_json

FORMAT = 1
_FILE = {
    "path": str,
    "blocks": int,
    "bytes?": int,
    "crc32?": int,
    "sha256": str,
    "sampled?": {int: int},  # CRC-32 of sampled blocks, by index
}
MANIFEST = {
    "format": int,
    "tokenizer": {"name": str, "sha256": str},
    "block": int,
    "dtype?": str,
    "text_sha256?": [str],  # one text hash per source file
    "beside?": {str: {"bytes": int, "crc32": int}},  # files next to the manifest
    "splits": {str: {str: {"blocks": int, "files": [_FILE]}}},
}
MAX_RECORDS = 10_000
OTHER = "is damaged: it differs from the file that was written with manifest.json."
AGAIN = "prepare the data again into another directory (`seqjax prepare`)"


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """Return the manifest in a block directory or URL.

    Raises `UserError` if it is missing or has another format, or if a block file is missing or has another size.
    """
    url = store.url_of(directory)
    root = url or str(directory)
    fix = f"make it with `seqjax prepare --source=... --out={directory} --tokenizer=...`"
    new = "make it with `seqjax prepare --source=... --out=NEW_DIR --tokenizer=...`"
    if url:
        sizes = store.sizes(url)
        fix = new = "make it with `seqjax prepare`, and copy all of its --out there"
    if not (sizes if url else Path(root).is_dir()):
        raise UserError(
            f"config.data.path: no directory {root}; {fix}, or correct the path. "
            "(The sizes demo and debug need no data.)"
        )
    path = f"{root}/manifest.json"
    text = _text(path, is_url=bool(url))
    if text is None:
        if not url and (Path(root) / ".parts").is_dir():
            raise UserError(
                f"config.data.path: {root} has an unfinished preparation; run the same `seqjax prepare` command again."
            )
        raise UserError(f"config.data.path: {root} has no manifest.json; {new}, or correct the path.")
    again = f"it is damaged: delete the directory and {fix}"
    manifest = parse_json(text, {"format": int}, path, fix=again)
    if manifest["format"] != FORMAT:
        raise UserError(f"{path} has format {manifest['format']}, this seqjax reads {FORMAT}; {new}.")
    check(manifest, MANIFEST, path, fix=again)
    files = [file for domains in manifest["splits"].values() for entry in domains.values() for file in entry["files"]]
    for name, written in ((file["path"], file.get("bytes")) for file in files):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{root}/manifest.json names {name}, which is not in its directory; {fix}.")
        size = sizes.get(name) if url else file_size(Path(root) / name)
        if size is None:
            raise UserError(f"{root}/{name} is missing; delete the directory and {fix}.")
        if written is None:
            raise UserError(f"{path} was written by a version before 0.1.0; {new}.")
        if size != written:
            raise UserError(
                f"{root}/{name} is damaged: it has {size} bytes, {written} were written. Put back a copy of it, or "
                f"delete {root} and {fix}."
            )
    return manifest


def _text(path: str, *, is_url: bool) -> bytes | None:
    """Return a file's or object's content; None if missing."""
    if is_url:
        return store.read(path)
    return Path(path).read_bytes() if Path(path).is_file() else None


def file_size(path: Path) -> int | None:
    """Return a file's size in bytes; None if missing."""
    return path.stat().st_size if path.is_file() else None


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 that identifies a run's data.

    It covers the tokenizer, the block length and every file's tokens.
    """
    files = {
        f"{split}/{domain}": [file["sha256"] for file in entry["files"]]
        for split, domains in manifest["splits"].items()
        for domain, entry in domains.items()
    }
    content = {"tokenizer": manifest["tokenizer"]["sha256"], "block": manifest["block"], "files": files}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


SMALL = (document_index.FILE, document_sources.FILE, stored_tokenizer.FILE)  # next to the manifest
HASHED = (document_index.FILE, document_sources.FILE)  # with checksums in the manifest


def file_checksums(directory: Path) -> dict[str, dict[str, int]]:
    """Return sizes and checksums of the files next to a manifest, by name."""
    measured = {name: measure(directory / name) for name in HASHED if (directory / name).is_file()}
    return {name: {"bytes": n_bytes, "crc32": crc} for name, (n_bytes, crc) in measured.items()}


def compare_files(directory: Path, manifest: dict[str, Any]) -> None:
    """Raise `UserError` if a file next to a manifest belongs to other blocks."""
    for name, written in manifest.get("beside", {}).items():
        if (directory / name).is_file() and measure(directory / name) != (written["bytes"], written["crc32"]):
            fix = document_sources.FIX if name == document_sources.FILE else AGAIN
            raise UserError(f"{directory / name} {OTHER} Put back a copy of it, or {fix}.")


def compare_all(directory: Path, manifest: dict[str, Any]) -> None:
    """Compare all blocks with the manifest.

    Raises `UserError` for the first file that differs.
    """
    compare_files(directory, manifest)
    for entry in (entry for domains in manifest["splits"].values() for entry in domains.values()):
        for file in entry["files"]:
            path = directory / file["path"]
            if "crc32" in file and measure(path) != (file["bytes"], file["crc32"]):
                raise UserError(f"{path} {OTHER} Put back a copy of it, or {AGAIN}.")
