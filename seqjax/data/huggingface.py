"""Read a public model's tokenizer, a Hugging Face `tokenizer.json`.

The package `tokenizers` reads the file. Ids equal those of the transformers tokenizer for the same file, without added
special tokens. As in transformers, a special token spelled out in a text ("</s>") becomes its id, unless
`tokenizer_config.json` sets `split_special_tokens`. A model without a start token, such as GPT-2, starts documents with
its end token.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.errors import MissingPackageError, UserError, first_line
from seqjax.reading import content, read_json

FILE = "tokenizer.json"
# Files that define the special tokens, in order of precedence: by text, then by id.
WITH_TEXT = ("tokenizer_config.json", "special_tokens_map.json")
WITH_IDS = ("generation_config.json", "config.json")

MOST_GROWTH = 1000  # largest factor by which a normalizer may lengthen a text
MOST_IDS = 1 << 24  # largest vocabulary, because arrays have an entry for every id
ID = range(MOST_IDS)
# The parts of a tokenizer.json that are read here. Vocabulary pieces are numerous and are checked separately.
SPEC = {
    "model": {"vocab?": (dict, list, None), "byte_fallback?": (bool, None), "unk_token?": (str, None)},
    "added_tokens?": ([{"id": ID, "content": str, "special?": (bool, None)}], None),
}
NAMES = {f"{key}_token?": (str, {"content": str}, None) for key in ("bos", "eos")}
IDS = {f"{key}_token_id?": (ID, [ID], None) for key in ("bos", "eos")}

_SPACE = "\u2581"  # a space in sentencepiece vocabularies
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class HuggingFaceTokenizer:
    """A `Tokenizer` that reads `tokenizer.json` at `path`, a file or its directory."""

    name = "huggingface"

    def __init__(self, path: str | Path):
        directory = directory_of(path)
        spec = _spec(directory)
        if (growth := _growth(spec.get("normalizer"))) > MOST_GROWTH:
            raise UserError(
                f"{directory / FILE}: its normalizer can make a text {growth:.0e} times as long, more than "
                f"{MOST_GROWTH:,} times. Fetch the file again."
            )
        try:
            import tokenizers  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            raise MissingPackageError(
                f"{directory / FILE} needs the package tokenizers: pip install 'seqjax[hf]'."
            ) from None
        self._file = directory / FILE
        with self._reporting("be read by the package tokenizers"):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self._file))
        # A file may set fixed lengths; transformers also ignores them unless the caller enables them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = bool(_json(directory / WITH_TEXT[0]).get("split_special_tokens"))
        bos, eos = special_ids(directory)
        if eos is None:
            raise UserError(
                f"{directory} defines no end token: set eos_token in its tokenizer_config.json, or "
                "eos_token_id in its generation_config.json."
            )
        self.bos: int = eos if bos is None else bos
        self.eos: int = eos
        self.hash = hash_of(directory)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.n_bytes = _n_bytes(spec, vocabulary)
        first = self._encoded("a").tokens[:1]
        self.adds_space = bool(first) and first[0].startswith((_SPACE, "Ġ"))
        self._dtype = np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")  # `tokenizer.id_dtype`

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, [n], without added special tokens."""
        return np.array(self._encoded(text).ids, self._dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text."""
        return [np.array(one.ids, self._dtype) for one in self._encoded(list(texts))]

    def _encoded(self, text: str | list[str]) -> Any:
        encode = self._tokenizer.encode if isinstance(text, str) else self._tokenizer.encode_batch
        with self._reporting("encode a text"):  # a vocabulary without an unknown token fails here
            return encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`.

        Special and unknown ids are dropped. Invalid UTF-8 becomes U+FFFD.
        """
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        with self._reporting("decode ids"):
            return self._tokenizer.decode(known, skip_special_tokens=True)

    @contextlib.contextmanager
    def _reporting(self, action: str) -> Iterator[None]:
        """Return a context that turns errors of the package into a `UserError`.

        A panic in the package's Rust code is a `BaseException`.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise UserError(f"{self._file} cannot {action} ({first_line(error)}); fetch it again.") from None


def directory_of(path: str | Path) -> Path:
    """Return the directory of the tokenizer at `path`.

    Raises `UserError` if it has no `tokenizer.json`.
    """
    directory = Path(path).parent if Path(path).name == FILE else Path(path)
    if not str(path) or not (directory / FILE).is_file():
        code = [file.name for file in sorted(directory.glob("*tokeniz*.py"))] if str(path) else []
        why = f" Its tokenizer is Python code ({', '.join(code)}), which is not run." if code else ""
        raise UserError(
            f"config.data.tokenizer_path={str(path)!r}: there is no {FILE}.{why} Give the directory of a public model "
            "with that file, or another config.data.tokenizer."
        )
    return directory


def hash_of(path: str | Path) -> str:
    """Return the SHA-256 of a tokenizer's `tokenizer.json` and special ids.

    It covers the file content and the start and end ids.
    """
    directory = directory_of(path)
    file = content(directory / FILE, fix="fetch it again")
    return hashlib.sha256(file + repr(special_ids(directory)).encode()).hexdigest()


def special_ids(directory: Path) -> tuple[int | None, int | None]:
    """Return the start and end ids; None if no file defines them.

    The first end id is used if there are several. Raises `UserError` for a token outside the vocabulary.
    """
    ids = _ids(_spec(directory)) if (directory / FILE).is_file() else {}
    return _special_id(directory, "bos_token", ids), _special_id(directory, "eos_token", ids)


def _special_id(directory: Path, key: str, ids: dict[str, int]) -> int | None:
    for name in WITH_TEXT if ids else ():
        token = _json(directory / name, NAMES).get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and token not in ids:
            raise UserError(f"{directory / name}: {key} is {token!r}, which {FILE} lacks; fetch both files again.")
        if token is not None:
            return ids[token]
    for name in WITH_IDS:
        value = _json(directory / name, IDS).get(f"{key}_id")
        value = next(iter(value), None) if isinstance(value, list) else value
        if value is not None:
            return value
    return None


def _ids(spec: dict[str, Any]) -> dict[str, int]:
    """Return every token's id in a tokenizer.json."""
    vocabulary = _vocabulary(spec)
    if isinstance(vocabulary, list):  # pairs of a piece and its score
        vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in spec.get("added_tokens") or ()}


def _vocabulary(spec: dict[str, Any]) -> Any:
    return spec["model"].get("vocab") or {}


def _is_vocabulary(vocabulary: Any) -> bool:
    """Return whether `vocabulary` maps pieces to ids, or lists (piece, score) pairs."""
    if isinstance(vocabulary, dict):
        return all(isinstance(i, int) and 0 <= i < MOST_IDS for i in vocabulary.values())
    return all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in vocabulary)


def _n_bytes(spec: dict[str, Any], vocabulary: dict[str, int]) -> np.ndarray:
    """Return the UTF-8 bytes per id; all 0, meaning unknown, for other formats.

    Supported are byte vocabularies, with one character per byte (GPT-2), and vocabularies that write a space as U+2581.
    """
    out = np.zeros(1 + max(vocabulary.values(), default=-1), np.int64)
    kinds = set(_types([spec.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]))
    bytewise = "ByteLevel" in kinds
    if not bytewise and not kinds & {"Metaspace", "ByteFallback"}:
        return out
    byte_fallback = bool(spec["model"].get("byte_fallback"))
    for piece, i in vocabulary.items():
        if bytewise:
            out[i] = len(piece)
        elif byte_fallback and _BYTE.fullmatch(piece):
            out[i] = 1
        else:
            out[i] = len(piece.replace(_SPACE, " ").encode())
    for token in spec.get("added_tokens") or ():
        out[token["id"]] = 0 if token.get("special") else len(token["content"].encode())
    unknown = spec["model"].get("unk_token")
    if unknown in vocabulary:
        out[vocabulary[unknown]] = 0
    return out


def _types(node: Any) -> Iterable[str]:
    """Yield every `type` in a tokenizer.json part."""
    if isinstance(node, dict):
        yield str(node.get("type"))
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _types(child)


def _growth(step: Any) -> float:
    """Return a normalizer's largest text growth factor, a product over its steps."""
    if not isinstance(step, dict):
        return 1.0
    if isinstance(steps := step.get("normalizers"), list):
        return math.prod(map(_growth, steps))
    pattern, added = step.get("pattern"), step.get("content", step.get("prepend", ""))
    replaced = pattern.get("String", "") if isinstance(pattern, dict) else ""
    sizes = [len(text) if isinstance(text, str) else 0 for text in (added, replaced)]
    return max(1.0, sizes[0] / max(1, sizes[1]))


def _spec(directory: Path) -> dict[str, Any]:
    spec = _json(directory / FILE, SPEC)
    if not _is_vocabulary(_vocabulary(spec)):
        raise UserError(f"{directory / FILE}: its vocab does not map pieces to ids below {MOST_IDS:,}; fetch it again.")
    return spec


def _json(path: Path, form: Any = dict) -> dict[str, Any]:
    """Return a JSON file's content, or an empty dict if the file is missing."""
    if not path.is_file():
        return {}
    return read_json(path, form, fix="fetch it again")
