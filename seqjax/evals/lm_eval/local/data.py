"""Data of the tasks of the group `local`, made from the held-out documents of the built-in corpus.

The texts are prose and docstrings of packages that are held out as a whole (seqjax/data/builtin). They depend on the
versions of Python and of the packages, so numbers compare only under the same `texts_hash`. A YAML task names a
function here as its `custom_dataset`. Its arguments are the task's metadata and `seqjax_cache_dir`, which is
config.data.cache_dir, the directory of the corpus. A fixed seed draws the same questions for every model.
"""

import functools
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data import document_index
from seqjax.data.blocks import FlatBlocks
from seqjax.data.builtin.corpus import build, read_manifest
from seqjax.data.tokenizer import ByteTokenizer, load_tokenizer

DOMAINS = ("prose", "doctest")  # the training domains, whose validation split is held out by package
EXAMPLES = 500  # of a task, at most
CONTEXT, CHOICE = 400, 80  # characters
WORDS, APART = 60, 10  # of a passage before its last word; how far back that word was there before
LINE, LINES = 12, 4  # words of a line, lines of a page
TEXTS, TEXT = 100, 3000  # whole texts, and their characters at most


def continuation(**metadata: Any) -> dict[str, Any]:
    """Return passages, each with its own continuation and those of three other documents."""
    rng, cut = random.Random(0), [_cut(text) for text in held_out(_cache_dir(metadata))]
    passages = [(i, *pair) for i, pairs in enumerate(cut) for pair in pairs]
    rows = []
    for i, context, own in _some(passages, rng):
        others = rng.sample([p for p in passages if p[0] != i], 3)
        start = own[: len(own) - len(own.lstrip())]
        choices = [start + text.lstrip() for _, _, text in others]
        gold = len(rows) % 4
        choices.insert(gold, own)
        rows.append({"context": context, "choices": choices, "gold": gold})
    return _dataset(rows)


def last_word(**metadata: Any) -> dict[str, Any]:
    """Return passages of 60 words, and a word in each that is not among its last ten."""
    rng, found = random.Random(1), []
    for text in held_out(_cache_dir(metadata)):
        words, end = text.split(), WORDS
        while end < len(words):
            passage, word = words[end - WORDS : end], words[end]
            if re.fullmatch("[a-z]{5,}", word) and word in passage[:-APART] and word not in passage[-APART:]:
                found.append({"context": " ".join(passage), "word": word})
                end += WORDS
            end += 1
    return _dataset(list(_some(found, rng)))


def copy(**metadata: Any) -> dict[str, Any]:
    """Return pages of four lines, followed by the first half of one of them, which is to be completed."""
    rng, lines = random.Random(2), []
    for text in held_out(_cache_dir(metadata)):
        words = [word for word in text.split() if re.fullmatch("[A-Za-z]+[.,]?", word)]
        lines += [words[i : i + LINE] for i in range(0, len(words) - LINE + 1, 4 * LINE)]
    rows = []
    for page in _some([lines[i : i + LINES] for i in range(0, len(lines) - LINES + 1, LINES)], rng):
        asked = page[len(rows) % LINES]
        begun = [" ".join(line) for line in page] + [" ".join(asked[: LINE // 2])]
        rows.append({"page": "\n".join(begun), "rest": " ".join(asked[LINE // 2 :])})
    return _dataset(rows)


def whole_texts(**metadata: Any) -> dict[str, Any]:
    """Return the beginnings of documents."""
    texts = [text[:TEXT] for text in held_out(_cache_dir(metadata)) if len(text) >= CONTEXT]
    return _dataset([{"text": text} for text in _some(texts, random.Random(3), TEXTS)])


def texts_hash(cache_dir: str = "") -> str:
    """Return the identity of the texts: the hash of the built-in corpus as bytes."""
    return read_manifest(_corpus(cache_dir))["hash"]


@functools.cache
def held_out(cache_dir: str = "") -> tuple[str, ...]:
    """Return the held-out documents; the corpus is built first, about ten seconds, if the cache lacks it."""
    directory = _corpus(cache_dir)
    splits = read_manifest(directory)["splits"]["validation"]
    lengths = document_index.read(directory / document_index.FILE)
    texts = []
    for domain in DOMAINS:
        tokens = splits[domain]["tokens"]
        ids = np.frombuffer(
            FlatBlocks(str(directory / splits[domain]["file"]), tokens=tokens, block=tokens)[0], np.uint16
        )
        of_documents = lengths.take(f"validation/{domain}", "iu", None)
        for document in np.split(ids, np.cumsum(of_documents.astype(np.int64))[:-1]):
            texts.append(load_tokenizer("byte").decode(document.tolist()))
    return tuple(texts)


def _corpus(cache_dir: str) -> Path:
    return build(ByteTokenizer(), cache_dir=cache_dir)


def _cache_dir(metadata: dict[str, Any]) -> str:
    return str(metadata.get("seqjax_cache_dir", ""))


def _cut(text: str) -> Iterator[tuple[str, str]]:
    """Yield passages of a document, up to four, and how each goes on; both end before white space."""
    for start in range(0, min(len(text), 4 * (CONTEXT + CHOICE)), CONTEXT + CHOICE):
        passage = text[start : start + CONTEXT + CHOICE + 1]
        if len(passage) == CONTEXT + CHOICE + 1:
            context = re.match(r"(.*)(?=\s)", passage[: CONTEXT + 1], re.S)
            whole = re.match(r"(.*)(?=\s)", passage, re.S)
            if context and whole and whole[0][len(context[0].rstrip()) :].strip():
                yield context[0].rstrip(), whole[0][len(context[0].rstrip()) :].rstrip()


def _some(found: Sequence[Any], rng: random.Random, n: int = EXAMPLES) -> Sequence[Any]:
    return rng.sample(found, min(n, len(found)))


def _dataset(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import datasets

    return {"test": datasets.Dataset.from_list(rows)}
