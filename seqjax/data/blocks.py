"""Token blocks on disk: ArrayRecord files of ids [T+1] with a manifest, and flat files of tokens.

A directory holds `manifest.json` and files `SPLIT/DOMAIN-00000.array_record`, each with at most 10,000
one-record groups, because random reads slow down with the number of groups in a file (tenfold at 120,000).
Records are uncompressed little-endian uint16, or uint32 for more than 65,536 ids, so that a read is a single copy.

The built-in corpus is small and must serve any block length, so it keeps one flat file of tokens per domain and cuts
the blocks when they are read.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
from grain import sources

from seqjax.errors import UserError

try:
    import resource
except ImportError:  # not on Windows
    resource = None

FORMAT = 1
MAX_RECORDS = 10_000
WRITER_OPTIONS = "group_size:1,uncompressed"
DTYPE = np.dtype("<u2")  # of ids, unless a vocabulary needs more (`tokenizer.id_dtype`)


class BlockSource(Protocol):
    """Random access to the blocks of one domain and split, each as the bytes of ids [T+1]."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        ...

    def __getitem__(self, index: int) -> bytes:
        """Return block `index` as bytes."""
        ...


class FlatBlocks:
    """Blocks of `block` tokens cut from a flat file of ids; an incomplete block at the end is not used."""

    def __init__(self, path: str, *, tokens: int, block: int, dtype: np.dtype = DTYPE):
        self._path, self._block, self._len, self._dtype = path, block, tokens // block, dtype
        self._ids: np.ndarray | None = None

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> bytes:
        if self._ids is None:
            self._ids = np.memmap(self._path, self._dtype, mode="r")
        if not 0 <= index < self._len:
            raise IndexError(index)
        return self._ids[index * self._block : (index + 1) * self._block].tobytes()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ids": None}  # Each worker process opens the file itself.

    def __repr__(self) -> str:
        return f"FlatBlocks({self._path!r}, {self._len} blocks)"


def record_blocks(directory: str | Path, entry: dict[str, Any]) -> BlockSource:
    """Return the blocks of one manifest entry; the counts come from the manifest, and no file is opened here."""
    paths = [f"{Path(directory) / file['path']}[0:{file['blocks']}]" for file in entry["files"]]
    return cast(BlockSource, sources.ArrayRecordDataSource(paths))


def allow_open_files(count: int) -> None:
    """Raise this process's limit on open files if `count` more would exceed it; a reader keeps its file open."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 512
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UserError(
            f"The blocks are in {count} files, and this process may open {hard}; raise the limit (`ulimit -Hn`), or "
            "name fewer domains in config.data.train_domains and eval_domains."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def write_records(path: Path, blocks: Iterator[np.ndarray]) -> str:
    """Write arrays of ids [n, T+1] as the records of one file, atomically, and return the sha256 of the records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    digest = hashlib.sha256()
    writer = array_record_module.ArrayRecordWriter(str(temporary), WRITER_OPTIONS)
    try:
        for rows in blocks:
            for row in rows:
                record = row.tobytes()
                digest.update(record)
                writer.write(record)
    finally:
        writer.close()
    temporary.replace(path)
    return digest.hexdigest()


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """Return the manifest of a directory of blocks; raise `UserError` for another format or for missing files."""
    root = Path(directory)
    fix = f"make it with `seqjax prepare --source=... --out={directory} --tokenizer=...`"
    if not root.is_dir():
        raise UserError(
            f"config.data.path: no directory {directory}; {fix}, or correct the path. "
            "(The sizes demo and debug need no data.)"
        )
    path = root / "manifest.json"
    if not path.is_file():
        unfinished = (root / ".parts").is_dir()
        state = "an unfinished preparation (run the same prepare command again)" if unfinished else "no manifest.json"
        raise UserError(f"config.data.path: {directory} has {state}; {fix}.")
    try:
        manifest = json.loads(path.read_text())
        version = manifest["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}); delete the directory and {fix}.") from None
    if version != FORMAT:
        raise UserError(f"{path} has format {version}, this seqjax reads {FORMAT}; {fix} into a new directory.")
    for domains in manifest["splits"].values():
        for entry in domains.values():
            for file in entry["files"]:
                if not (root / file["path"]).is_file():
                    raise UserError(f"{root / file['path']} is missing; delete the directory and {fix}.")
    return manifest


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the sha256 of what a run reads: the tokenizer, the block length and the tokens of every file."""
    files = {
        f"{split}/{domain}": [file["sha256"] for file in entry["files"]]
        for split, domains in manifest["splits"].items()
        for domain, entry in domains.items()
    }
    content = {"tokenizer": manifest["tokenizer"]["sha256"], "block": manifest["block"], "files": files}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
