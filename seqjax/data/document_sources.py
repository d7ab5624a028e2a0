"""Record each document's source: its repository, package or web host.

`layout.source_of` determines a source. Documents from one source resemble each other, so evaluation precision grows
with the number of sources. `sources.npz` next to a manifest holds the sources for every domain with a known source:

    SPLIT/DOMAIN    uint32 [documents], each document's index into the names; `UNKNOWN` if unknown
    names/DOMAIN    uint8, the concatenated source names in UTF-8
    ends/DOMAIN     int64 [names], the end of each name in bytes

Documents are in the order of `documents.npz`. The file is missing if no source is known. The manifest hash excludes it,
so blocks with and without sources are the same data.

Evaluations identify a source by `number`, a hash of its name that is equal in every split, domain and directory. A
document without a known source is its own source, with the number -1 - its index.
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
FIX = "delete it to evaluate without sources, or prepare the data again into another --out"


class Names(dict[str, int]):
    """Source names, each mapped to its index."""

    def index(self, name: str) -> int:
        """Return a name's index, adding new names; `UNKNOWN` for an empty name."""
        return self.setdefault(name, len(self)) if name else UNKNOWN


def write(path: Path, indices: Mapping[str, np.ndarray], names: Mapping[str, Names]) -> None:
    """Write document source indices, and source names by domain, atomically."""
    arrays: dict[str, Any] = {key: value.astype(np.uint32) for key, value in indices.items()}
    for domain, of_domain in names.items():
        encoded = [_encoded(name) for name in of_domain]
        arrays[f"names/{domain}"] = np.frombuffer(b"".join(encoded), np.uint8)
        arrays[f"ends/{domain}"] = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    with replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read(path: Path) -> Arrays:
    """Return the arrays that `write` wrote, or none if the file is missing.

    Raises `UserError` if the file is damaged.
    """
    if not path.is_file():
        return Arrays(path, {}, fix=FIX)
    arrays = read_arrays(path, fix=FIX)
    for name in arrays:
        arrays.take(name, "u" if name.startswith("names/") else "iu", None)
    return arrays


def names_of(arrays: Arrays, domain: str, keys: Mapping[str, int], documents: np.ndarray) -> list[str]:
    """Return the source name of each given document, "" if unknown.

    Args:
        arrays: The arrays from `read`.
        domain: The domain.
        keys: The domain's array names in concatenation order, each with its document count.
        documents: The document indices, int [n].

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
    used_names = ["" if i == UNKNOWN else content[bounds[i] : bounds[i + 1]].decode("utf-8", "replace") for i in used]
    return [used_names[i] for i in of_document]


def number(name: str) -> int:
    """Return a source's number, the first 63 bits of its name's SHA-256."""
    return int.from_bytes(hashlib.sha256(_encoded(name)).digest()[:8], "big") >> 1


def numbers(names: Sequence[str], documents: np.ndarray) -> np.ndarray | None:
    """Return each block's source number, int64 [blocks].

    Blocks with equal numbers have the same source. `names` are the sources of the blocks' documents, "" if unknown, and
    `documents` [blocks] are the document indices. Returns None if no source is known.
    """
    if not any(names):
        return None
    of_name = {name: number(name) for name in set(names) if name}
    return np.array([of_name.get(name, -1 - d) for name, d in zip(names, documents.tolist(), strict=True)], np.int64)


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "backslashreplace")  # "\ud800" is valid JSON
