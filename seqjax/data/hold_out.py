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
    out; where that is less than a block, the documents of lowest hash that fill one, if a block is left to train on.
    """
    lowest = round(share * HASHES)
    if lengths[hashes < lowest].sum() >= block:
        return lowest
    order = np.argsort(hashes, kind="stable")
    enough = np.flatnonzero(np.cumsum(lengths[order]) >= block)
    higher = int(hashes[order[enough[0]]]) + 1 if len(enough) else lowest
    return higher if lengths[hashes >= higher].sum() >= block else lowest
