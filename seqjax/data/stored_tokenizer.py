"""Store the tokenizer data that training and evaluation need, `tokenizer.npz`.

The file is stored with prepared blocks. Blocks hold ids, so training needs no tokenizer, but bits per byte need the
byte count of each id. With this file, the training machine does not need the tokenizer's package. Converting text still
needs it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from seqjax.data import huggingface
from seqjax.data.tokenizer import Tokenizer
from seqjax.errors import MissingPackageError, UserError
from seqjax.files import replacing
from seqjax.reading import read_arrays

FILE = "tokenizer.npz"


class StoredTokenizer:
    """A `Tokenizer` that cannot convert text.

    `why` is the resulting error message, naming the missing package.
    """

    def __init__(
        self,
        *,
        name: str,
        hash: str,
        bos: int,
        eos: int,
        n_bytes: np.ndarray,
        adds_space: bool,
        why: str,
    ):
        self.name, self.hash, self.bos, self.eos = name, hash, bos, eos
        self.vocab_size, self.n_bytes, self.adds_space = len(n_bytes), n_bytes, adds_space
        self._why = why

    def is_of(self, path: str | Path) -> bool:
        """Return whether this is the tokenizer of the model file at `path`.

        An empty path means the package's default model, which is not checked.
        """
        if self.name == huggingface.HuggingFaceTokenizer.name:
            return huggingface.hash_of(path) == self.hash
        return not path or (Path(path).is_file() and hashlib.sha256(Path(path).read_bytes()).hexdigest() == self.hash)

    def encode(self, text: str) -> np.ndarray:
        """Raise `MissingPackageError`."""
        raise MissingPackageError(self._why)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Raise `MissingPackageError`."""
        raise MissingPackageError(self._why)

    def decode(self, ids: Iterable[int]) -> str:
        """Raise `MissingPackageError`."""
        raise MissingPackageError(self._why)


def write(path: str | Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer's metadata atomically."""
    with replacing(Path(path)) as file:
        np.savez_compressed(
            file,
            allow_pickle=False,
            name=np.array(tokenizer.name),
            hash=np.array(tokenizer.hash),
            special=np.array([tokenizer.bos, tokenizer.eos], np.int64),
            n_bytes=tokenizer.n_bytes.astype(np.int64),
            adds_space=np.array(tokenizer.adds_space),
        )


def read(path: str | Path, *, why: str) -> StoredTokenizer:
    """Return the stored tokenizer.

    `why` is the reason for using it. Raises `UserError` if the file is damaged.
    """
    fix = "delete it and run the same `seqjax prepare` command again, which writes it"
    arrays = read_arrays(path, fix=fix)
    bos, eos = map(int, arrays.take("special", "iu", 2))
    return StoredTokenizer(
        name=str(arrays.take("name", "U")),
        hash=str(arrays.take("hash", "U")),
        bos=bos,
        eos=eos,
        n_bytes=arrays.take("n_bytes", "iu", None),
        adds_space=bool(arrays.take("adds_space", "b")),
        why=why,
    )


def is_intact(path: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a file holds the metadata of a tokenizer, undamaged."""
    try:
        return read(path, why="").hash == tokenizer.hash
    except UserError:
        return False
