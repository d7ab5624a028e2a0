"""Map blocks to their documents, and select blocks spread over all documents.

Losses of blocks from one document are correlated, so evaluation precision grows with the number of documents, not
blocks. `documents.npz` next to a manifest holds all document lengths in tokens, including BOS and EOS. It has one array
"SPLIT/DOMAIN" per split and domain, in concatenation order. The manifest hash excludes it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.errors import UserError
from seqjax.files import replacing
from seqjax.reading import Arrays, read_arrays

FILE = "documents.npz"


def write(path: Path, lengths: Mapping[str, np.ndarray]) -> None:
    """Write arrays of document lengths atomically.

    A reader sees the old file or the complete new file.
    """
    arrays: dict[str, Any] = {key: value.astype(np.uint32) for key, value in lengths.items()}
    with replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read(path: Path) -> Arrays:
    """Return the arrays that `write` wrote.

    Raises `UserError` if the file is missing or damaged.
    """
    if not path.is_file():
        raise UserError(
            f"{path} is missing: it was deleted, or a version before 0.1.0 prepared the blocks. Prepare the data again "
            "into another --out."
        )
    arrays = read_arrays(path, fix="prepare the data again into another --out")
    for name in arrays:
        arrays.take(name, "iuf", None)
    return arrays


def block_documents(lengths: np.ndarray, *, block: int, n_blocks: int) -> np.ndarray:
    """Return the document with most tokens in each block, int64 [n_blocks].

    On ties the first document wins. `lengths` are the lengths of the documents that were concatenated and cut into
    blocks of `block` tokens.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = n_blocks * block
    # Each piece lies within one block and one document.
    cuts = np.union1d(ends, np.arange(1, n_blocks + 1) * block)
    cuts = cuts[cuts <= total]
    starts = np.concatenate([[0], cuts[:-1]])[: len(cuts)]
    blocks, documents = starts // block, np.searchsorted(ends, starts, side="right")
    order = np.lexsort((documents, starts - cuts, blocks))  # by block, then the longest piece, then the first document
    first = np.searchsorted(blocks[order], np.arange(n_blocks))
    return documents[order][first]


def spread(documents: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """Return `count` block indices in ascending order, spread over documents.

    Each document contributes one block before any document contributes a second. Only `seed` determines the selected
    documents and their blocks. If there are at most `count` blocks, all are returned.
    """
    shuffled = np.random.default_rng(seed).permutation(len(documents))
    owners = documents[shuffled]
    by_document = np.argsort(owners, kind="stable")
    _, begins, sizes = np.unique(owners[by_document], return_index=True, return_counts=True)
    rank = np.empty(len(owners), np.int64)  # number of earlier blocks from the same document, in shuffled order
    rank[by_document] = np.arange(len(owners)) - np.repeat(begins, sizes)
    return np.sort(shuffled[np.argsort(rank, kind="stable")[:count]])
