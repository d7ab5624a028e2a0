"""Choose the documents to hold out if the data has no validation split.

Documents with the lowest text hashes are held out. Equal texts are therefore in the same split. The choice does not
depend on the document order or on the number of reading processes.
"""

import hashlib

import numpy as np

SHARE = 0.01  # share of documents to hold out
HASHES = 1 << 32


def text_hash(text: str) -> int:
    """Return a text's hash, uniform below `HASHES`; it decides the split."""
    return first_bits(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest())


def first_bits(sha256: bytes) -> int:
    """Return the `text_hash` of the text with this SHA-256."""
    return int.from_bytes(sha256[:4], "little")


def limit(hashes: np.ndarray, lengths: np.ndarray, *, share: float, block: int) -> int:
    """Return the hash limit below which a document is held out for validation.

    `hashes` [n] and `lengths` [n] (tokens) belong to all documents of a domain. The limit holds out `share` of the
    documents. If these do not fill a block, it holds out the fewest lowest hashes that do, provided that a block
    remains for training.
    """
    lowest = round(share * HASHES)
    if lengths[hashes < lowest].sum() >= block:
        return lowest
    order = np.argsort(hashes, kind="stable")
    enough = np.flatnonzero(np.cumsum(lengths[order]) >= block)
    higher = int(hashes[order[enough[0]]]) + 1 if len(enough) else lowest
    return higher if lengths[hashes >= higher].sum() >= block else lowest
