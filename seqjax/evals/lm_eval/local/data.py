"""Build the `local` tasks from held-out documents in the built-in corpus.

The texts are prose and docstrings from packages that are held out entirely (seqjax/data/builtin). They depend on the
installed Python and package versions, so compare numbers only at equal `texts_hash`. A YAML task sets its
`custom_dataset` to a function in this module. The function receives the task's metadata and `seqjax_cache_dir`, the
corpus directory (config.data.cache_dir). Fixed seeds give all models the same questions.
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

DOMAINS = ("prose", "doctest")  # the training domains; their validation split is held out by package
EXAMPLES = 500  # maximum per task
CONTEXT, CHOICE = 400, 80  # characters
WORDS, APART = 60, 10  # words before the target word; the target must not occur in the last 10
LINE, LINES = 12, 4  # words per line, lines per page
TEXTS, TEXT = 100, 3000  # maximum number of whole texts, and maximum characters per text


def continuation(**metadata: Any) -> dict[str, Any]:
    """Return passages with four possible continuations.

    One is the true continuation; three come from other documents.
    """
    rng, cut = random.Random(0), [_cut(text) for text in held_out(_cache_dir(metadata))]
    passages = [(i, *pair) for i, pairs in enumerate(cut) for pair in pairs]
    rows = []
    for i, context, target in _some(passages, rng):
        distractors = rng.sample([p for p in passages if p[0] != i], 3)
        start = target[: len(target) - len(target.lstrip())]
        choices = [start + text.lstrip() for _, _, text in distractors]
        gold = len(rows) % 4
        choices.insert(gold, target)
        rows.append({"context": context, "choices": choices, "gold": gold})
    return _dataset(rows)


def last_word(**metadata: Any) -> dict[str, Any]:
    """Return passages of 60 words and their next words.

    The next word occurs earlier in the passage, but not in its last ten words.
    """
    rng, rows = random.Random(1), []
    for text in held_out(_cache_dir(metadata)):
        words, end = text.split(), WORDS
        while end < len(words):
            passage, word = words[end - WORDS : end], words[end]
            if re.fullmatch("[a-z]{5,}", word) and word in passage[:-APART] and word not in passage[-APART:]:
                rows.append({"context": " ".join(passage), "word": word})
                end += WORDS
            end += 1
    return _dataset(list(_some(rows, rng)))


def copy(**metadata: Any) -> dict[str, Any]:
    """Return pages of four lines, followed by the first half of one line.

    The target is the line's second half.
    """
    rng, lines = random.Random(2), []
    for text in held_out(_cache_dir(metadata)):
        words = [word for word in text.split() if re.fullmatch("[A-Za-z]+[.,]?", word)]
        lines += [words[i : i + LINE] for i in range(0, len(words) - LINE + 1, 4 * LINE)]
    rows = []
    for page in _some([lines[i : i + LINES] for i in range(0, len(lines) - LINES + 1, LINES)], rng):
        repeated = page[len(rows) % LINES]
        page_lines = [" ".join(line) for line in page] + [" ".join(repeated[: LINE // 2])]
        rows.append({"page": "\n".join(page_lines), "rest": " ".join(repeated[LINE // 2 :])})
    return _dataset(rows)


def whole_texts(**metadata: Any) -> dict[str, Any]:
    """Return the first 3,000 characters of up to 100 documents."""
    texts = [text[:TEXT] for text in held_out(_cache_dir(metadata)) if len(text) >= CONTEXT]
    return _dataset([{"text": text} for text in _some(texts, random.Random(3), TEXTS)])


def texts_hash(cache_dir: str = "") -> str:
    """Return the hash of the byte-level built-in corpus, which identifies the texts."""
    return read_manifest(_corpus(cache_dir))["hash"]


@functools.cache
def held_out(cache_dir: str = "") -> tuple[str, ...]:
    """Return the held-out documents.

    This builds the corpus first (about 10 s) if it is not cached.
    """
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
    """Yield up to four (passage, continuation) pairs from a document.

    Both end before white space.
    """
    for start in range(0, min(len(text), 4 * (CONTEXT + CHOICE)), CONTEXT + CHOICE):
        passage = text[start : start + CONTEXT + CHOICE + 1]
        if len(passage) == CONTEXT + CHOICE + 1:
            context = re.match(r"(.*)(?=\s)", passage[: CONTEXT + 1], re.S)
            text_match = re.match(r"(.*)(?=\s)", passage, re.S)
            if context and text_match and text_match[0][len(context[0].rstrip()) :].strip():
                yield context[0].rstrip(), text_match[0][len(context[0].rstrip()) :].rstrip()


def _some(items: Sequence[Any], rng: random.Random, n: int = EXAMPLES) -> Sequence[Any]:
    return rng.sample(items, min(n, len(items)))


def _dataset(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import datasets

    return {"test": datasets.Dataset.from_list(rows)}
