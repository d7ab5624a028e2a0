"""Passkey prompts: a number hidden in repeated lines, as RULER's S-NIAH-1 asks for it (Hsieh et al., arXiv 2404.06654).

A seed gives the samples that lm-evaluation-harness 0.4.13 draws for `niah_single_1` with the same tokenizer: the same
lines, words and numbers, in the same order of random draws. The words are those of the package wonderwords, as there.
"""

import functools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from seqjax.errors import MissingPackageError

LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
PROMPT = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n{context}\nWhat is the special magic number for {key} mentioned in the provided text?"
)
ANSWER = " The special magic number for {key} mentioned in the provided text is"
NEW_TOKENS = 128  # that the model may write


class Sample(NamedTuple):
    """A prompt, which ends where the model is to write the number, and the number."""

    prompt: str
    value: str


def samples(count: Callable[[str], int], *, length: int, n: int, rng: random.Random) -> Iterator[Sample]:
    """Yield `n` samples of at most `length` tokens, with those that the model writes.

    Args:
        count: The number of tokens of a text.
        length: Tokens of the prompt without the start of its answer, and `NEW_TOKENS`.
        n: Number of samples.
        rng: Several lengths in a row share it, as in the harness, which seeds it with 0.

    A sample that does not fit is left out. Raises `ValueError` if none can fit, and `MissingPackageError` without
    wonderwords.
    """
    words = _words()
    by = 5 if length < 4096 else 25
    n_lines, of_line = by, count(LINE + "\n")
    if count(_draw(random.Random(0), 1, words)[0]) + NEW_TOKENS > length:
        raise ValueError(f"no passkey prompt has {length} tokens with the {NEW_TOKENS} that are written; give more")
    while True:
        text, sample = _draw(rng, n_lines, words)
        # Lines are counted for sure only near the end: counting a long text again and again takes minutes.
        if 1.2 * of_line * n_lines + 1000 < length:
            n_lines += by
            continue
        total = count(f"{text} {sample.value}")
        if total + NEW_TOKENS > length:
            n_lines -= by
            break
        n_lines += by
        if total + NEW_TOKENS == length:
            break
    n_lines = max(n_lines, 1)
    for _ in range(n):
        for lines in range(n_lines, 0, -by):
            text, sample = _draw(rng, lines, words)
            if count(text) + NEW_TOKENS <= length:
                yield sample
                break


def _draw(rng: random.Random, n_lines: int, words: list[str]) -> tuple[str, Sample]:
    """Return the question alone, and the sample."""
    key, value = rng.choice(words), str(rng.randint(10**6, 10**7 - 1))
    lines = [LINE] * n_lines
    lines.insert(rng.sample(range(n_lines), 1)[0], NEEDLE.format(key=key, value=value))
    rng.sample(range(1), 1)  # the harness draws which of one key it asks for
    text = PROMPT.format(context="\n".join(lines), key=key)
    return text, Sample(text + ANSWER.format(key=key), value)


@functools.cache
def _words() -> list[str]:
    try:
        import wonderwords
    except ModuleNotFoundError:
        raise MissingPackageError(
            "The words of passkey prompts are those of wonderwords: pip install 'seqjax[harness]'."
        ) from None
    known = wonderwords.RandomWord()._categories
    return sorted({f"{adjective}-{noun}" for adjective in known["adjectives"] for noun in known["nouns"]})


def is_right(text: str, value: str) -> bool:
    """Return whether the model has written the number, wherever in its text."""
    return value in text
