"""Read and write token blocks: ArrayRecord files of ids [T+1] and flat id files.

A block directory holds `manifest.json` and files `SPLIT/DOMAIN-00000.array_record`. Each file has at most 10,000
one-record groups, because random reads slow down with the group count (tenfold at 120,000). Records are uncompressed
little-endian uint16, or uint32 for vocabularies over 65,536 ids, so a read is a single copy.

The built-in corpus is small and must serve any block length. It keeps one flat token file per domain and cuts blocks on
reading.

array_record opens only local files. Before the first step, the needed files of `gs://bucket/blocks` (or another fsspec
URL) are therefore copied to `blocks/HASH` in the cache: `config.data.cache_dir` or `~/.cache/seqjax`. HASH is computed
from the manifest, so different data under one URL cannot mix. Files appear only when complete. The processes of a
machine share one copy, and it stays until the user deletes it.
"""

import bisect
import hashlib
import os
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from absl import logging
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from seqjax.data import manifests
from seqjax.data.manifests import file_size
from seqjax.data.tokenizer import id_dtype
from seqjax.errors import UserError, first_line
from seqjax.files import DISK_FULL, temporary_beside

try:
    import resource
except ImportError:  # not on Windows
    resource = None

SAMPLED = 4  # blocks per file with a checksum in the manifest
CHECKED_FILES = 32  # files with sampled blocks compared before the first step
WRITER_OPTIONS = "group_size:1,uncompressed"
DTYPE = np.dtype("<u2")  # id dtype, unless the vocabulary needs a larger one (`tokenizer.id_dtype`)


class BlockSource(Protocol):
    """Random access to one domain's blocks in one split, as bytes of ids [T+1]."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        ...

    def __getitem__(self, index: int) -> bytes:
        """Return block `index` as bytes."""
        ...


class FlatBlocks:
    """Blocks of `block` tokens cut from a flat id file.

    An incomplete block at the end is not used.
    """

    def __init__(self, path: str, *, tokens: int, block: int, dtype: np.dtype = DTYPE):
        self._path, self._block, self._len, self._dtype = path, block, tokens // block, dtype
        self._ids: np.ndarray | None = None

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> bytes:
        if self._ids is None:
            actual, needed = file_size(Path(self._path)) or 0, self._len * self._block * self._dtype.itemsize
            if actual < needed:
                raise UserError(
                    f"{self._path}, a cached corpus, has {actual} bytes instead of {needed}. Delete "
                    f"{Path(self._path).parent}; the next run rebuilds it."
                )
            self._ids = np.memmap(self._path, self._dtype, mode="r")
        if not 0 <= index < self._len:
            raise IndexError(index)
        return self._ids[index * self._block : (index + 1) * self._block].tobytes()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ids": None}  # Each worker process opens the file again.

    def __repr__(self) -> str:
        return f"FlatBlocks({self._path!r}, {self._len} blocks)"


class RecordBlocks:
    """The blocks of one manifest entry.

    Block counts come from the manifest; a file is opened at its first read. Reading an invalid record raises
    `UserError` with the file name.
    """

    def __init__(
        self, directory: str | Path, entry: dict[str, Any], *, block: int, vocab_size: int, dtype: np.dtype = DTYPE
    ):
        """Read records of `block` ids, each id of `dtype` and below `vocab_size`."""
        # This imports JAX. `seqjax prepare` writes these files and does not need JAX.
        from grain import sources

        files = [(str(Path(directory) / file["path"]), file["blocks"]) for file in entry["files"]]
        self._sampled = [list(file.get("sampled", {}).items()) for file in entry["files"]]
        self._compared: set[int] = set()  # files with at least one compared block
        self._paths, self._ends = [path for path, _ in files], np.cumsum([count for _, count in files]).tolist()
        self._records = sources.ArrayRecordDataSource([f"{path}[0:{count}]" for path, count in files])
        self._bytes, self._dtype, self._vocab_size = block * dtype.itemsize, dtype, vocab_size

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> bytes:
        file = bisect.bisect_right(self._ends, index)
        if file not in self._compared:
            self._compare(file, self._sampled[file][:1])
            self._compared.add(file)  # after the comparison, so that no thread reads an unchecked file
        return self._record(index)

    @property
    def has_checksums(self) -> bool:
        """Whether the manifest has block checksums; earlier versions wrote none."""
        return all(self._sampled)

    def compare(self, n_files: int) -> None:
        """Compare sampled blocks in at most `n_files` files with the manifest.

        Raises `UserError` if a block differs.
        """
        for i in range(n := min(n_files, len(self._paths))):
            file = i * (len(self._paths) - 1) // max(1, n - 1)
            self._compare(file, self._sampled[file])

    def _compare(self, file: int, sampled: list[tuple[str, int]]) -> None:
        first = self._ends[file - 1] if file else 0
        for i, crc in sampled:
            if zlib.crc32(self._record(first + int(i))) != crc:
                raise self._damaged(first + int(i), "it differs from the written block")

    def _record(self, index: int) -> bytes:
        try:
            record = cast(bytes, self._records[index])
        except Exception as error:  # The errors of array_record's C++ reader lack the file name.
            raise self._damaged(index, first_line(error)) from error
        if len(record) != self._bytes:
            raise self._damaged(index, f"{len(record)} bytes instead of {self._bytes}")
        highest = int(np.frombuffer(record, self._dtype).max())
        if highest >= self._vocab_size:
            raise self._damaged(index, f"id {highest} is out of range, the tokenizer has {self._vocab_size} ids")
        return record

    def __repr__(self) -> str:
        return f"RecordBlocks({self._paths[0]!r}, {len(self)} blocks)"

    def _damaged(self, index: int, why: str) -> UserError:
        file = bisect.bisect_right(self._ends, index)
        first = self._ends[file - 1] if file else 0
        return UserError(
            f"{self._paths[file]} is damaged, block {index - first}: {why}. Put back a copy of the file, or prepare "
            "the data again into another directory (`seqjax prepare`); a run can resume on it if the data is equal."
        )


def open_records(
    directory: Path, manifest: dict[str, Any], *, domains: Collection[str] | None = None, vocab_size: int
) -> dict[str, dict[str, RecordBlocks]]:
    """Return blocks by split and domain, for some domains (None for all).

    Raises `UserError` if a file next to the manifest, or one of a few sampled blocks, differs from the written one.
    """
    dtype = id_dtype(vocab_size)
    sources = {
        split: {
            domain: RecordBlocks(directory, entry, block=manifest["block"], vocab_size=vocab_size, dtype=dtype)
            for domain, entry in entries.items()
            if entry["files"] and (domains is None or domain in domains)
        }
        for split, entries in manifest["splits"].items()
    }
    allow_open_files(sum(len(e["files"]) for entries in manifest["splits"].values() for e in entries.values()))
    manifests.compare_files(directory, manifest)
    opened = [source for entries in sources.values() for source in entries.values()]
    for source in opened:
        source.compare(max(1, CHECKED_FILES // len(opened)))
    if not all(source.has_checksums for source in opened):
        logging.warning(
            "%s: an earlier version prepared these blocks without checksums, so they are not checked.", directory
        )
    return sources


def allow_open_files(count: int) -> None:
    """Raise this process's open-file limit if `count` more files would exceed it.

    Each reader keeps its file open. Raises `UserError` if the hard limit is too low.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = count + 512
    if soft == resource.RLIM_INFINITY or soft >= required:
        return
    if hard != resource.RLIM_INFINITY and hard < required:
        raise UserError(
            f"The blocks are in {count} files, but this process may open only {hard}; raise the limit "
            "(`ulimit -Hn`), or list fewer domains in config.data.train_domains and eval_domains."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard))


def to_sample(n_blocks: int) -> list[int]:
    """Return the block indices of a file that get a checksum in the manifest."""
    return sorted({i * (n_blocks - 1) // (SAMPLED - 1) for i in range(SAMPLED)}) if n_blocks else []


def write_records(
    path: Path, blocks: Iterator[np.ndarray], *, sampled: Collection[int] = ()
) -> tuple[str, dict[str, int]]:
    """Write arrays of ids [n, T+1] as the records of one file, atomically.

    Returns the SHA-256 over all records, and the CRC-32 of each `sampled` record by index.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    digest, checksums, index = hashlib.sha256(), {}, 0
    writer = array_record_module.ArrayRecordWriter(str(temporary), WRITER_OPTIONS)
    try:
        try:
            for rows in blocks:
                for row in rows:
                    record = row.tobytes()
                    digest.update(record)
                    writer.write(record)
                    if index in sampled:
                        checksums[str(index)] = zlib.crc32(record)
                    index += 1
        finally:
            writer.close()
    except RuntimeError as error:  # array_record's error contains the system's message for a full disk
        full = next((number for number in DISK_FULL if os.strerror(number) in str(error)), None)
        if full is None:
            raise
        raise OSError(full, os.strerror(full), str(path)) from error
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    return digest.hexdigest(), checksums
