"""Define the tokenizer interface; provide raw bytes, Mixtral and public models.

Mixtral's 32,000-piece vocabulary comes from sentencepiece with `tokenizer.model.v1`, which mistral-common ships. The
file is located without importing that package, and its SHA-256 is checked. No other tokenizer library is used, because
conversions change ids. Text is encoded word by word through a word cache, three times as fast. The ids are equal: no
piece in this vocabulary crosses a word end, so merges cannot either.

Public models use their `tokenizer.json` (huggingface.py). Every manifest contains the tokenizer hash, so blocks made
with one vocabulary are never used with another.
"""

import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from seqjax import store
from seqjax.data.huggingface import HuggingFaceTokenizer
from seqjax.errors import MissingPackageError, UserError, nearest
from seqjax.reading import content

MIXTRAL_SHA256 = "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"
NAMES = ("byte", "mixtral", "huggingface")
_INSTALL = "install it with `pip install 'seqjax[mixtral]'`, or take the byte tokenizer"

BATCH_CHARS = 1 << 19  # characters per `encode_batch` call

MAX_WORDS = 1 << 18  # words per cache half, about 50 MB
MAX_WORD_CHARS = 48

_SPACE = "\u2581"  # sentencepiece's space character
_WORD = re.compile(r" *[^ \n]+| +|\n")
# Texts that reveal a vocabulary or normaliser unsuitable for `_WordCache`.
_PROBES = (
    "",
    " ",
    "  a  b ",
    "a\n b\n\n\n  c",
    "\t\r\n\x00",
    "x=1;  //12.5e3",
    "\ufb01 \u2460 \u00e9e\u0301 \U0001f600 \u4e2d\u6587",
)


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the id dtype, in memory and in block files.

    Little-endian uint16, or uint32 for vocabularies over 65,536 ids.
    """
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to ids of `id_dtype(vocab_size)` and back.

    `encode` never adds `bos` or `eos`.
    """

    name: str
    hash: str  # SHA-256 of the model file or the definition
    vocab_size: int
    bos: int
    eos: int
    n_bytes: np.ndarray  # int64 [vocab_size]: UTF-8 bytes per id, 0 for special tokens or if unknown
    adds_space: bool  # whether encoding prepends a space to a non-empty text

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, [n], without special tokens."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`.

        Special and unknown ids are dropped. Invalid UTF-8 becomes U+FFFD.
        """
        ...


def with_specials(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Return a document, BOS + ids + EOS, in `id_dtype`."""
    return np.concatenate([[tokenizer.bos], ids, [tokenizer.eos]]).astype(id_dtype(tokenizer.vocab_size))


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then BOS and EOS."""

    name = "byte"
    hash = hashlib.sha256(b"seqjax byte tokenizer: 256 bytes, bos 256, eos 257").hexdigest()
    vocab_size = 258
    bos = 256
    eos = 257
    n_bytes = np.array([1] * 256 + [0, 0], np.int64)
    adds_space = False

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, uint16 [n], without special tokens."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`.

        Special ids are dropped. Invalid UTF-8 becomes U+FFFD.
        """
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")


class MixtralTokenizer:
    """A sentencepiece tokenizer, by default mistral-common's `tokenizer.model.v1`.

    `path` selects another model file.
    """

    name = "mixtral"

    def __init__(self, path: str = ""):
        try:
            import sentencepiece
        except ImportError:
            raise MissingPackageError(f"The mixtral tokenizer needs sentencepiece: {_INSTALL}.") from None
        file = Path(path) if path else _shipped_model()
        if not file.is_file():
            raise UserError(
                f"config.data.tokenizer_path: no file {file}; give a sentencepiece model or leave it empty."
            )
        model = content(file, fix="give a sentencepiece model as config.data.tokenizer_path")
        self.hash = hashlib.sha256(model).hexdigest()
        if not path and self.hash != MIXTRAL_SHA256:
            raise UserError(
                f"{file} is not the Mixtral vocabulary (sha256 {self.hash[:12]}, expected "
                f"{MIXTRAL_SHA256[:12]}); reinstall mistral-common, or give the right file as "
                "config.data.tokenizer_path."
            )
        try:
            self._sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        except Exception as error:
            raise UserError(
                f"{file} is not a sentencepiece model ({error}); give another config.data.tokenizer_path."
            ) from None
        self.vocab_size: int = self._sp.vocab_size()
        self.bos: int = self._sp.bos_id()
        self.eos: int = self._sp.eos_id()
        if self.bos < 0 or self.eos < 0:
            raise UserError(
                f"{file} has bos {self.bos} and eos {self.eos}: blocks need both special tokens; give another "
                "config.data.tokenizer_path."
            )
        self._dtype = id_dtype(self.vocab_size)
        self.n_bytes = np.array([self._size(i) for i in range(self.vocab_size)], np.int64)
        self.adds_space = self._sp.id_to_piece(self._sp.encode("a")[0]).startswith(_SPACE)
        self._words: _WordCache | None = None
        self._words = self._word_cache_or_none()

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, [n], without special tokens."""
        if self._words is None:
            return np.array(self._sp.encode(text), self._dtype)
        # As in sentencepiece, prepend a space and read `_SPACE` as a space.
        words = _WORD.findall(f" {text}".replace(_SPACE, " ")) if text else ()
        return np.frombuffer(b"".join(map(self._words.__getitem__, words)), self._dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`.

        Special and unknown ids are dropped. Invalid UTF-8 becomes U+FFFD.
        """
        plain = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        return self._sp.decode([i for i in plain if not self._sp.is_control(i)])

    def serialized(self) -> bytes:
        """Return the content of the sentencepiece model file."""
        return self._sp.serialized_model_proto()

    def _size(self, i: int) -> int:
        """Return the UTF-8 byte count of id `i`."""
        if self._sp.is_control(i) or self._sp.is_unknown(i):
            return 0
        return 1 if self._sp.is_byte(i) else len(self._sp.id_to_piece(i).replace(_SPACE, " ").encode())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_words": _WordCache(self._sp) if self._words is not None else None}

    def _word_cache_or_none(self) -> "_WordCache | None":
        """Return a word cache, or None if words cannot be encoded separately."""
        pieces = [self._sp.id_to_piece(i) for i in range(self.vocab_size)]
        if any("\n" in piece or re.search(f"[^{_SPACE}]{_SPACE}", piece) for piece in pieces):
            return None
        self._words = _WordCache(self._sp)
        same = all(self.encode(probe).tolist() == self._sp.encode(probe) for probe in _PROBES)
        return self._words if same else None


class _WordCache(dict[str, bytes]):
    """Maps a word to its ids, as bytes of `id_dtype`.

    A word is a line feed, or spaces with the following characters. A full cache becomes the old half, and a new half
    starts; words still in use move to it.
    """

    def __init__(self, sp: Any):
        super().__init__()
        self._sp = sp
        self._old: dict[str, bytes] = {}
        self._line_feed = len(sp.encode("\n"))
        self._dtype = id_dtype(sp.vocab_size())

    def __missing__(self, word: str) -> bytes:
        encoded = self._old.get(word)
        if encoded is None:
            encoded = np.array(self._encode(word), self._dtype).tobytes()
        if len(self) >= MAX_WORDS:
            self._old = dict(self)
            self.clear()
        if len(word) <= MAX_WORD_CHARS:
            self[word] = encoded
        return encoded

    def _encode(self, word: str) -> list[int]:
        if word == " ":
            return [self._sp.piece_to_id(_SPACE)]
        if word[0] == " ":
            return self._sp.encode(word[1:])  # sentencepiece prepends the first space again
        return self._sp.encode("\n" + word)[self._line_feed :]


def _shipped_model() -> Path:
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        raise MissingPackageError(f"The mixtral tokenizer needs the vocabulary file of mistral-common: {_INSTALL}.")
    file = Path(spec.origin).parent / "data" / "tokenizer.model.v1"
    if not file.is_file():
        raise UserError(
            f"This mistral-common has no {file.name}: install mistral-common 1.13, or give the file as "
            "config.data.tokenizer_path."
        )
    return file


@functools.cache
def load_tokenizer(name: str, path: str | Path = "") -> Tokenizer:
    """Return the tokenizer `name` (byte | mixtral | huggingface).

    `path` is a sentencepiece file for mixtral. For huggingface it is a public model's directory or its tokenizer.json.
    Raises `UserError` for an unknown name, a missing package or an unsuitable file.
    """
    path = store.location(path) if path else path
    if name == "byte":
        if path:
            raise UserError(
                "config.data.tokenizer_path is for the other tokenizers; "
                "set config.data.tokenizer='mixtral' or 'huggingface', or leave the path empty."
            )
        return ByteTokenizer()
    if name == "mixtral":
        return MixtralTokenizer(str(path))
    if name == "huggingface":
        return HuggingFaceTokenizer(path)
    raise UserError(f"config.data.tokenizer={name!r} is not known.{nearest(name, NAMES)}")
