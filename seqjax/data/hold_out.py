"""Choose the documents to hold out for validation, where the data has no validation split.

The documents with the lowest hashes of their text are held out. Equal texts are thus in the same split, and the choice
depends neither on the order of the documents nor on the number of processes that read them.
"""

import hashlib

import numpy as np

SHARE = 0.01  # of the documents
HASHES = 1 << 32


def text_hash(text: str) -> int:
    """Return the hash that decides whether a document is held out, uniform below `HASHES`."""
    return first_bits(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest())


def first_bits(sha256: bytes) -> int:
    """Return the `text_hash` of the text with this SHA-256."""
    return int.from_bytes(sha256[:4], "little")


def limit(hashes: np.ndarray, lengths: np.ndarray, *, share: float, block: int) -> int:
    """Return the number below which a hash puts a document into the validation split.

    `hashes` [n] and `lengths` [n], in tokens, are those of all documents of a domain. `share` of the documents are held
    out, or the nearest number of them that leaves a block of tokens on both sides. Where no number does, the split with
    too little text is validation.
    """
    lowest = round(share * HASHES)
    order = np.argsort(hashes, kind="stable")
    held = np.concatenate([[0], np.cumsum(lengths[order])])  # tokens, by the number of documents
    limits = np.concatenate([[0], hashes[order].astype(np.int64) + 1])
    last = np.append(limits[1:] != limits[:-1], True)  # equal texts are on one side
    held, limits = held[last], limits[last]
    trained = held[-1] - held
    now = np.searchsorted(limits, lowest, side="right") - 1
    fits = np.flatnonzero((held >= block) & (trained >= block))
    if now in fits or (not len(fits) and trained[now] >= block):
        return lowest
    if not len(fits):
        return 0
    return int(limits[fits[0] if held[now] < block else fits[-1]])
