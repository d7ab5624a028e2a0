"""Counts the tokens of every document of a domain, once, and keeps the counts in a file.

Without them nobody knows where a block begins, how much text a domain has, or which documents the evaluation blocks are
from. Counting costs the tokenising of the whole domain. What is kept is 8 bytes a document: its tokens and the hash by
which it may be held out.
"""

import concurrent.futures
import dataclasses
import hashlib
import multiprocessing
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from absl import logging

from seqjax.data import hold_out
from seqjax.data.document_blocks import Documents
from seqjax.data.tokenizer import BATCH_CHARS, Tokenizer, with_specials
from seqjax.errors import UserError
from seqjax.files import replacing
from seqjax.processes import end_with_parent
from seqjax.terminal import StatusLine

RANGE = 1024  # documents counted together; the digest depends on it


@dataclasses.dataclass(frozen=True)
class Counts:
    """What was counted of n documents.

    Attributes:
        lengths: uint32 [n], tokens with BOS and EOS; 0 for a document without text.
        hashes: uint32 [n], the hash of each by which it is held out (`seqjax.data.hold_out`).
        digest: Identifies the tokens of all of them.
    """

    lengths: np.ndarray
    hashes: np.ndarray
    digest: str


def counted(path: Path, documents: Documents, tokenizer: Tokenizer, *, workers: int) -> Counts:
    """Return the counts that `path` holds, which are made and written there first if it is missing or damaged.

    Above 1, `workers` is the number of processes that count. Raises `UserError` if `path` cannot be written.
    """
    found = _read(path, len(documents))
    if found is not None:
        return found
    logging.info("Counting the tokens of %s: %s documents, once; kept in %s.", documents.name, len(documents), path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = count(documents, tokenizer, workers=workers)
        with replacing(path) as file:
            np.savez(file, lengths=found.lengths, hashes=found.hashes, digest=np.array(found.digest))
    except OSError as error:
        raise UserError(
            f"Cannot keep the counts of {documents.name} in {path.parent} ({error.strerror}); "
            "set config.data.cache_dir to a directory that can be written."
        ) from error
    return found


def count(documents: Documents, tokenizer: Tokenizer, *, workers: int = 0) -> Counts:
    """Return the counts of all documents, the same with any number of processes."""
    begins = range(0, len(documents), RANGE)
    line = StatusLine()
    lengths, hashes, digests = [np.empty(0, np.uint32)], [np.empty(0, np.uint32)], []
    for of_lengths, of_hashes, digest in _ranges(documents, tokenizer, begins, workers):
        lengths.append(of_lengths)
        hashes.append(of_hashes)
        digests.append(digest)
        if len(digests) < len(begins):
            line.show(f"Counting the tokens of {documents.name}: {100 * len(digests) // len(begins)}%")
    line.say(f"Counted the tokens of {documents.name}: {sum(int(n.sum()) for n in lengths):,}")
    return Counts(np.concatenate(lengths), np.concatenate(hashes), hashlib.sha256(b"".join(digests)).hexdigest())


_Range = tuple[np.ndarray, np.ndarray, bytes]  # lengths, hashes, digest


def _ranges(documents: Documents, tokenizer: Tokenizer, begins: range, workers: int) -> Iterator[_Range]:
    workers = min(workers, len(begins))
    if workers <= 1:
        for begin in begins:
            yield _count_range(documents, tokenizer, begin)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (documents, tokenizer))
    try:
        yield from pool.map(_count_in_worker, begins, chunksize=4)
    except BrokenProcessPool:
        raise UserError(
            f"A process that counted the tokens of {documents.name} was killed, perhaps for want of memory; "
            "give fewer config.data.workers."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_of_worker: tuple[Documents, Tokenizer] | None = None


def _start_worker(documents: Documents, tokenizer: Tokenizer) -> None:
    global _of_worker
    _of_worker = documents, tokenizer
    end_with_parent()


def _count_in_worker(begin: int) -> _Range:
    assert _of_worker is not None
    return _count_range(*_of_worker, begin)


def _count_range(documents: Documents, tokenizer: Tokenizer, begin: int) -> _Range:
    """Return the lengths and hashes of `RANGE` documents from `begin` on, and the sha256 of their tokens."""
    numbers = range(begin, min(begin + RANGE, len(documents)))
    lengths = np.zeros(len(numbers), np.uint32)
    hashes = np.zeros(len(numbers), np.uint32)
    digest = hashlib.sha256()
    for batch in _batches((number - begin, documents[number]) for number in numbers):
        for (place, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
            tokens = with_specials(tokenizer, ids)
            lengths[place], hashes[place] = len(tokens), hold_out.text_hash(text)
            digest.update(tokens.tobytes())
    return lengths, hashes, digest.digest()


def _batches(texts: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Yield the texts that are not empty, so many together that the tokenizer is called seldom."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for number, text in texts:
        if text:
            batch.append((number, text))
            characters += len(text)
        if characters >= BATCH_CHARS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _read(path: Path, n_documents: int) -> Counts | None:
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            found = Counts(arrays["lengths"], arrays["hashes"], str(arrays["digest"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return found if len(found.lengths) == len(found.hashes) == n_documents else None
