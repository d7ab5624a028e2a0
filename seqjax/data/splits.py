"""Detect a file's split (train, validation or test) from its folders or name.

A folder names a split if it consists of a split word, optionally with numbers and neutral words such as "set": `val`,
`Validation`, `test_set_2`. The innermost such folder decides. Otherwise the first split word in the file name decides,
as in `c4-validation.00000-of-00001.json.gz`. The name of a one-document file is a title, so it counts only if it
consists of a split word. All other files belong to train.
"""

import re
from collections.abc import Iterable, Iterator

SPLITS = ("train", "validation", "test")
WORDS = {
    "train": ("training", "train"),
    "validation": ("validation", "valid", "val", "dev", "evaluation", "eval", "heldout", "holdout"),
    "test": ("testing", "test"),
}
NEUTRAL = frozenset(("set", "data", "dataset", "split", "part", "shard", "chunk", "file", "of"))

_OF_WORD = {word: split for split, words in WORDS.items() for word in words}
_ANY = "|".join(_OF_WORD)  # a longer word precedes its prefixes
_WORD = re.compile(rf"({_ANY})(?:{_ANY})*(?:set|data|split)?s?")
_FUSED = re.compile(r"valid|test|eval|heldout|holdout")
_FIRST = re.compile(rf"({'|'.join(SPLITS)})(?=[-.]|$)")


def split_of(name: str, *, outer: str = "", is_title: bool = False) -> str:
    """Return the split that contains a file.

    Args:
        name: The path of the file below the source, without its ending.
        outer: The name of the source's folder. It counts only if it equals a split word.
        is_title: Whether the file is one document.
    """
    *folders, stem = name.split("/")
    for part in reversed(folders):
        if split := named_split(part):
            return split
    if outer.lower() in _OF_WORD:
        return _OF_WORD[outer.lower()]
    if match := _FIRST.match(stem):
        return match[1]
    if is_title:
        return named_split(stem) or "train"
    return next(_split_words(_words(stem)), "train")


def named_split(part: str) -> str:
    """Return the split that a folder or title names by itself.

    "" if it has no split word, several splits or any other word.
    """
    words = _words(part)
    named = set(_split_words(words))
    rest = [word for word in words if not word.isdigit() and word.removesuffix("s") not in NEUTRAL]
    return named.pop() if len(named) == 1 and all(_WORD.fullmatch(word) for word in rest) else ""


def look_alikes(names: Iterable[str]) -> list[str]:
    """Return names and folders of training files that resemble validation or test."""
    alike: dict[str, None] = {}
    for name in names:
        parts = name.split("/")
        for i, part in enumerate(parts, start=1):
            if any(_looks(word) for word in _words(part)):
                alike["/".join(parts[:i]) + ("/" if i < len(parts) else "")] = None
    return list(alike)


def _looks(word: str) -> bool:
    if _WORD.fullmatch(word):
        return re.sub("training|train", "", word) not in ("", "s", "set", "sets", "data", "split", "splits")
    return any(match.start() == 0 or match.end() == len(word) for match in _FUSED.finditer(word))


def _split_words(words: list[str]) -> Iterator[str]:
    return (_OF_WORD[match[1]] for word in words if (match := _WORD.fullmatch(word)))


def _words(part: str) -> list[str]:
    """Return the lower-case words and numbers in a name.

    `ValidationSet_02` gives validation, set and 02.
    """
    separate = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", part)
    together = re.sub(r"\b(held|hold)[-_. ]out\b", r"\1out", separate.lower().replace("_", " "))
    return re.findall(r"[^\W\d_]+|\d+", together)
