"""Which documents the blocks of a domain hold, and a choice of blocks that is spread over all of them.

The losses of two blocks of one document resemble each other, so what an evaluation can tell grows with the number of
documents, not of blocks. `documents.npz` beside a manifest keeps the lengths of all documents in tokens, BOS and EOS
included, one array "SPLIT/DOMAIN" each, in the order in which they were joined. It is no part of the manifest's hash.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.errors import UserError
from seqjax.files import replacing

FILE = "documents.npz"


def write(path: Path, lengths: Mapping[str, np.ndarray]) -> None:
    """Write arrays of document lengths so that a reader sees the old file or the whole new one."""
    arrays: dict[str, Any] = {key: value.astype(np.uint32) for key, value in lengths.items()}
    with replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read(path: Path) -> dict[str, np.ndarray]:
    """What `write` wrote; empty where there is no such file (blocks that an older version prepared)."""
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} is damaged ({error}); delete it, or prepare the data again into another --out."
        ) from None


def block_documents(lengths: np.ndarray, *, block: int, n_blocks: int) -> np.ndarray:
    """The document that holds most tokens of each block (the first one of several), int64 [n_blocks].

    `lengths` are those of the documents that were joined and cut into blocks of `block` tokens.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = n_blocks * block
    # Pieces that lie in one block and one document each.
    cuts = np.union1d(ends, np.arange(1, n_blocks + 1) * block)
    cuts = cuts[cuts <= total]
    starts = np.concatenate([[0], cuts[:-1]])[: len(cuts)]
    blocks, documents = starts // block, np.searchsorted(ends, starts, side="right")
    order = np.lexsort((documents, starts - cuts, blocks))  # by block, then the longest piece, then the first document
    first = np.searchsorted(blocks[order], np.arange(n_blocks))
    return documents[order][first]


def spread(documents: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """Indices [count] in ascending order: every document gives one block before any gives a second, and so on.

    Which documents, where there are more than `count`, and which of their blocks is decided by `seed` alone; all
    blocks are taken where there are no more than `count`.
    """
    shuffled = np.random.default_rng(seed).permutation(len(documents))
    owners = documents[shuffled]
    by_owner = np.argsort(owners, kind="stable")
    _, begins, sizes = np.unique(owners[by_owner], return_index=True, return_counts=True)
    rank = np.empty(len(owners), np.int64)  # how many blocks of the same document come before, in the shuffled order
    rank[by_owner] = np.arange(len(owners)) - np.repeat(begins, sizes)
    return np.sort(shuffled[np.argsort(rank, kind="stable")[:count]])
