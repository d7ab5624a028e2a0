"""Token blocks on disk: ArrayRecord files of ids [T+1] with a manifest, flat files of tokens, and copies from a store.

A directory holds `manifest.json` and files `SPLIT/DOMAIN-00000.array_record`, each with at most 10,000
one-record groups, because random reads slow down with the number of groups in a file (tenfold at 120,000).
Records are uncompressed little-endian uint16, or uint32 for more than 65,536 ids, so that a read is a single copy.

The built-in corpus is small and must serve any block length, so it keeps one flat file of tokens per domain and cuts
the blocks when they are read.

array_record opens only local files. The files that a run reads from `gs://bucket/blocks` (or any other URL that fsspec
opens) are therefore copied before the first step into `blocks/HASH` of the cache, `config.data.cache_dir` or
`~/.cache/seqjax`. HASH is that of the manifest, so other data under the same URL never mix with them. Files appear when
they are complete. Processes of one machine wait for the process that copies and share the copy, which stays until the
user deletes it.
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

SAMPLED = 4  # blocks of a file whose checksums the manifest has
CHECKED_FILES = 32  # whose sampled blocks are compared before the first step
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
            found, needed = file_size(Path(self._path)) or 0, self._len * self._block * self._dtype.itemsize
            if found < needed:
                raise UserError(
                    f"{self._path} has {found} bytes instead of {needed}; delete {Path(self._path).parent}, and it is "
                    "built again."
                )
            self._ids = np.memmap(self._path, self._dtype, mode="r")
        if not 0 <= index < self._len:
            raise IndexError(index)
        return self._ids[index * self._block : (index + 1) * self._block].tobytes()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ids": None}  # Each worker process opens the file itself.

    def __repr__(self) -> str:
        return f"FlatBlocks({self._path!r}, {self._len} blocks)"


class RecordBlocks:
    """The blocks of one manifest entry; a record that is not a block of ids raises an error that names its file.

    The counts come from the manifest, and no file is opened before a block is read.
    """

    def __init__(
        self, directory: str | Path, entry: dict[str, Any], *, block: int, vocab_size: int, dtype: np.dtype = DTYPE
    ):
        """Read ids of `dtype` below `vocab_size`, `block` in a record."""
        # Imported here because it imports JAX, which `seqjax prepare`, the writer of these files, does not need.
        from grain import sources

        files = [(str(Path(directory) / file["path"]), file["blocks"]) for file in entry["files"]]
        self._sampled = [list(file.get("sampled", {}).items()) for file in entry["files"]]
        self._compared: set[int] = set()  # files of which a sampled block was compared
        self._paths, self._ends = [path for path, _ in files], np.cumsum([count for _, count in files]).tolist()
        self._records = sources.ArrayRecordDataSource([f"{path}[0:{count}]" for path, count in files])
        self._bytes, self._dtype, self._vocab_size = block * dtype.itemsize, dtype, vocab_size

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> bytes:
        file = bisect.bisect_right(self._ends, index)
        if file not in self._compared:
            self._compare(file, self._sampled[file][:1])
            self._compared.add(file)  # afterwards: another thread compares as well, and reads nothing unchecked
        return self._record(index)

    @property
    def has_checksums(self) -> bool:
        """Whether the manifest has checksums of blocks, which earlier versions did not write."""
        return all(self._sampled)

    def compare(self, n_files: int) -> None:
        """Compare the sampled blocks of at most `n_files` files with the manifest; raise `UserError` for others."""
        for i in range(n := min(n_files, len(self._paths))):
            file = i * (len(self._paths) - 1) // max(1, n - 1)
            self._compare(file, self._sampled[file])

    def _compare(self, file: int, sampled: list[tuple[str, int]]) -> None:
        first = self._ends[file - 1] if file else 0
        for i, crc in sampled:
            if zlib.crc32(self._record(first + int(i))) != crc:
                raise self._damaged(first + int(i), "it is another block than was written")

    def _record(self, index: int) -> bytes:
        try:
            record = cast(bytes, self._records[index])
        except Exception as error:  # array_record raises the errors of its C++ reader, without the name of the file.
            raise self._damaged(index, first_line(error)) from error
        if len(record) != self._bytes:
            raise self._damaged(index, f"{len(record)} bytes instead of {self._bytes}")
        highest = int(np.frombuffer(record, self._dtype).max())
        if highest >= self._vocab_size:
            raise self._damaged(index, f"the id {highest} is not among the {self._vocab_size} of the tokenizer")
        return record

    def __repr__(self) -> str:
        return f"RecordBlocks({self._paths[0]!r}, {len(self)} blocks)"

    def _damaged(self, index: int, why: str) -> UserError:
        file = bisect.bisect_right(self._ends, index)
        first = self._ends[file - 1] if file else 0
        return UserError(
            f"{self._paths[file]} is damaged, block {index - first}: {why}. Put back a copy of the file, or prepare "
            "the data again into another directory (`seqjax prepare`); a run goes on with it if it is the same data."
        )


def open_records(
    directory: Path, manifest: dict[str, Any], *, domains: Collection[str] | None = None, vocab_size: int
) -> dict[str, dict[str, RecordBlocks]]:
    """Return the blocks of some domains (None for all), by split and domain, after a check.

    Raises `UserError` if a file beside the manifest, or one of a few blocks, is another one than was written.
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
    manifests.compare_beside(directory, manifest)
    opened = [source for entries in sources.values() for source in entries.values()]
    for source in opened:
        source.compare(max(1, CHECKED_FILES // len(opened)))
    if not all(source.has_checksums for source in opened):
        logging.warning(
            "%s: an earlier version, which wrote no checksums, prepared it; its blocks are not checked.", directory
        )
    return sources


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


def to_sample(n_blocks: int) -> list[int]:
    """Return the indices of the blocks of a file whose checksums the manifest has."""
    return sorted({i * (n_blocks - 1) // (SAMPLED - 1) for i in range(SAMPLED)}) if n_blocks else []


def write_records(
    path: Path, blocks: Iterator[np.ndarray], *, sampled: Collection[int] = ()
) -> tuple[str, dict[str, int]]:
    """Write arrays of ids [n, T+1] as the records of one file, atomically.

    Returns the sha256 of all records, and the CRC-32 of the records `sampled`, by index.
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
    except RuntimeError as error:  # of array_record, with the system's words for a full disk in it
        full = next((number for number in DISK_FULL if os.strerror(number) in str(error)), None)
        if full is None:
            raise
        raise OSError(full, os.strerror(full), str(path)) from error
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    return digest.hexdigest(), checksums
