"""The source of each document: the repository, package or web host that it comes from (`layout.source_of`).

Documents of one source resemble each other, so the precision of an evaluation grows with the number of sources.
`sources.npz` beside a manifest holds them for every domain in which a source is known:

    SPLIT/DOMAIN    uint32 [documents], the index of the source of each document in the names; `UNKNOWN` if unknown
    names/DOMAIN    uint8, the names of the sources in UTF-8, one after the other
    ends/DOMAIN     int64 [names], the end of each name in bytes

Documents are in the order of `documents.npz`. The file is missing if no source is known. The manifest's hash excludes
it, so blocks with and without sources are the same data.

An evaluation identifies a source by the number that `number` computes from its name. A source thus has the same number
in every split, domain and directory. A document of unknown source is its own source, with the number -1 - its index.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.files import replacing
from seqjax.reading import Arrays, read_arrays

FILE = "sources.npz"
UNKNOWN = (1 << 32) - 1
FIX = "delete it, and the sources are unknown, or prepare the data again into another --out"


class Names(dict[str, int]):
    """The names of sources, each with its index."""

    def index(self, name: str) -> int:
        """Return the index of a name, which is added if it is new, or `UNKNOWN` for an empty name."""
        return self.setdefault(name, len(self)) if name else UNKNOWN


def write(path: Path, indices: Mapping[str, np.ndarray], names: Mapping[str, Names]) -> None:
    """Write the indices of documents and, by domain, the names of sources, atomically."""
    arrays: dict[str, Any] = {key: value.astype(np.uint32) for key, value in indices.items()}
    for domain, of_domain in names.items():
        encoded = [_encoded(name) for name in of_domain]
        arrays[f"names/{domain}"] = np.frombuffer(b"".join(encoded), np.uint8)
        arrays[f"ends/{domain}"] = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    with replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read(path: Path) -> Arrays:
    """Return the arrays that `write` wrote, none if there is no file; raise `UserError` if it is damaged."""
    if not path.is_file():
        return Arrays(path, {}, fix=FIX)
    arrays = read_arrays(path, fix=FIX)
    for name in arrays:
        arrays.take(name, "u" if name.startswith("names/") else "iu", None)
    return arrays


def names_of(arrays: Arrays, domain: str, keys: Mapping[str, int], documents: np.ndarray) -> list[str]:
    """Return the name of the source of each of some documents of a domain; empty names for unknown sources.

    Args:
        arrays: The arrays of `read`.
        domain: The domain.
        keys: The arrays of the domain's documents, which are concatenated, and the number of documents of each.
        documents: The indices of the documents, int [n].

    Raises:
        UserError: The file belongs to other documents.
    """
    if f"names/{domain}" not in arrays:
        return [""] * len(documents)
    indices = np.concatenate([arrays.take(key, "iu", n) for key, n in keys.items()])[documents]
    ends = arrays.take(f"ends/{domain}", "iu", None)
    content = arrays.take(f"names/{domain}", "u", None).astype(np.uint8).tobytes()
    used, of_document = np.unique(indices, return_inverse=True)
    if len(known := used[used != UNKNOWN]):
        arrays.take(f"ends/{domain}", "iu", max(len(ends), int(known[-1]) + 1))
    bounds = [0, *ends.tolist()]
    found = ["" if i == UNKNOWN else content[bounds[i] : bounds[i + 1]].decode("utf-8", "replace") for i in used]
    return [found[i] for i in of_document]


def number(name: str) -> int:
    """Return the number of a source, the first 63 bits of the SHA-256 of its name."""
    return int.from_bytes(hashlib.sha256(_encoded(name)).digest()[:8], "big") >> 1


def numbers(names: Sequence[str], documents: np.ndarray) -> np.ndarray | None:
    """Return the source of each block, int64 [blocks]: equal numbers are the same source.

    `names` are those of the sources of the blocks' documents, empty if unknown, and `documents` [blocks] the indices of
    the documents. None if no source is known.
    """
    if not any(names):
        return None
    of_name = {name: number(name) for name in set(names) if name}
    return np.array([of_name.get(name, -1 - d) for name, d in zip(names, documents.tolist(), strict=True)], np.int64)


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "backslashreplace")  # "\ud800" is valid JSON
