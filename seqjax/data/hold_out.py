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
    documents, or the nearest number that leaves a block of tokens on both sides. If no number does, validation has too
    little text.
    """
    lowest = round(share * HASHES)
    order = np.argsort(hashes, kind="stable")
    held = np.concatenate([[0], np.cumsum(lengths[order])])  # tokens, by the number of documents
    limits = np.concatenate([[0], hashes[order].astype(np.int64) + 1])
    last = np.append(limits[1:] != limits[:-1], True)  # equal texts stay in one split
    held, limits = held[last], limits[last]
    trained = held[-1] - held
    now = np.searchsorted(limits, lowest, side="right") - 1
    fits = np.flatnonzero((held >= block) & (trained >= block))
    if now in fits or (not len(fits) and trained[now] >= block):
        return lowest
    if not len(fits):
        return 0
    return int(limits[fits[0] if held[now] < block else fits[-1]])
