"""The tasks: sequences of ids with targets at some positions, drawn on the fly.

Six ask for something that came before, which selection over the whole sequence finds and a state must have kept:

    mqar            values of keys, many queries per sequence (Arora et al., "Zoology", arXiv 2312.04927, section 3.2)
    copy_selected   the tokens among noise, in order (selective copying: Gu and Dao, "Mamba", arXiv 2312.00752, 4.1.1)
    induction       the token after the last appearance of a marker (induction heads: "Mamba", 4.1.2)
    ngram           the token after an n-gram (Jelassi et al., "Repeat After Me", arXiv 2402.01032, n-gram lookup)
    position        the token at a position that is given as a number
    copy            the whole string (string copying: "Repeat After Me")

One asks for a state, which a fixed number of attention layers cannot keep for long sequences:

    s5              the product so far of permutations of five things (Merrill et al., "The Illusion of State in
                    State-Space Models", arXiv 2404.08819)

Every task is a frozen dataclass; `examples` draws sequences, and a test that is longer or holds more is the same
dataclass with other numbers.
"""

import abc
import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np

IGNORED = -1  # a target at a position where nothing is asked


class Examples(NamedTuple):
    """Inputs and targets, both int32 [B, T]; a target is `IGNORED` or the id that the model is to give there."""

    inputs: np.ndarray
    targets: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """What all tasks have: `length` inputs per sequence, with ids below `vocab_size`."""

    length: int

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of ids."""

    @abc.abstractmethod
    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""

    def _blank(self, n: int) -> Examples:
        return Examples(np.zeros((n, self.length), np.int32), np.full((n, self.length), IGNORED, np.int32))

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"{self}: {what}")


def _subsets(scores: np.ndarray, size: int) -> np.ndarray:
    """Return the indices of the `size` smallest of every row [B, N], in no order: a random subset of random scores."""
    return np.argpartition(scores, size - 1)[:, :size]


def _distinct(rng: np.random.Generator, n: int, size: int, *, below: int) -> np.ndarray:
    """Return `n` rows of `size` different integers from 0 to `below` - 1, in random order, int64 [B, size]."""
    if size**2 > below:
        return rng.permuted(_subsets(rng.random((n, below)), size), axis=1)
    # A row is rarely drawn anew: cheaper than a random number for every integer.
    rows, again = np.empty((n, size), np.int64), np.arange(n)
    while len(again):
        rows[again] = rng.integers(below, size=(len(again), size))
        ordered = np.sort(rows[again])
        again = again[(ordered[:, 1:] == ordered[:, :-1]).any(1)]
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """`pairs` keys with their values, then each key once more among noise; asked for is the value at each of these.

    The gaps between a pair and its query follow a power law, so most queries come early; ids below `ids` / 2 are keys,
    the others values, and noise is any id. As in zoology, the value itself does not appear after the query.
    """

    pairs: int
    ids: int = 8192
    power: float = 0.01

    def __post_init__(self):
        self._require(4 * self.pairs <= self.length, "needs a length of at least four times the pairs")
        self._require(2 * self.pairs < self.ids, "needs more ids than twice the pairs")

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.ids

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        keys = 1 + _distinct(rng, n, self.pairs, below=self.ids // 2 - 1)
        values = self.ids // 2 + _distinct(rng, n, self.pairs, below=self.ids // 2)
        context = 2 * self.pairs
        inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
        inputs[:, context:] = rng.integers(self.ids, size=(n, self.length - context))
        places = np.arange(1, (self.length - context) // 2 + 1)
        # The largest of log p + Gumbel noise are a sample without replacement in the shares p.
        scores = (self.power - 1) * np.log(places) + rng.gumbel(size=(n, len(places)))
        at = context + 2 * _subsets(-scores, self.pairs)
        np.put_along_axis(inputs, at, keys, 1)
        np.put_along_axis(targets, at, values, 1)
        return Examples(inputs, targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopySelected(Task):
    """`tokens` tokens at random places among noise, then as many markers, at which they are asked for in order."""

    tokens: int = 16
    ids: int = 16

    def __post_init__(self):
        self._require(2 * self.tokens <= self.length, "needs a length of at least twice the tokens")

    @property
    def vocab_size(self) -> int:
        """The tokens, noise and the marker."""
        return self.ids + 2

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        noise, marker = self.ids, self.ids + 1
        context = self.length - self.tokens
        inputs[:, :context], inputs[:, context:] = noise, marker
        found = rng.integers(self.ids, size=(n, self.tokens))
        at = np.sort(_subsets(rng.random((n, context)), self.tokens))
        np.put_along_axis(inputs, at, found, 1)
        targets[:, context:] = found
        return Examples(inputs, targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Induction(Task):
    """Random tokens, somewhere among them a marker; at its second appearance, the end, the token that followed it."""

    ids: int = 16

    def __post_init__(self):
        self._require(self.length >= 3, "needs three tokens")

    @property
    def vocab_size(self) -> int:
        """The tokens and the marker."""
        return self.ids + 1

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        inputs[:] = rng.integers(self.ids, size=inputs.shape)
        at = rng.integers(self.length - 2, size=n)
        inputs[np.arange(n), at] = inputs[:, -1] = self.ids
        targets[:, -1] = inputs[np.arange(n), at + 1]
        return Examples(inputs, targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ngram(Task):
    """A string, a separator and `n` tokens in a row of the string; asked for is the token that followed them.

    No n-gram of the string appears twice, so there is one answer.
    """

    ids: int = 32
    n: int = 2

    def __post_init__(self):
        self._require(self.length >= 2 * self.n + 2, "is too short for its n-grams")
        # Not half of all n-grams, so that drawing anew ends soon.
        self._require(self._string <= self.ids**self.n // 2, "needs more ids for n-grams that appear once")

    @property
    def _string(self) -> int:
        return self.length - 1 - self.n

    @property
    def vocab_size(self) -> int:
        """The tokens and the separator."""
        return self.ids + 1

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        for row, target in zip(inputs, targets, strict=True):
            string: list[int] = []
            while len(string) < self._string:
                string = self._grown(rng.integers(self.ids, size=self._string).tolist(), rng)
            start = int(rng.integers(self._string - self.n))
            row[:] = [*string, self.ids, *string[start : start + self.n]]
            target[-1] = string[start + self.n]
        return Examples(inputs, targets)

    def _grown(self, drawn: list[int], rng: np.random.Generator) -> list[int]:
        """Return a string in which an n-gram that was there before has another last token; cut where there is none."""
        seen: set[tuple[int, ...]] = set()
        for i in range(self.n - 1, len(drawn)):
            start = tuple(drawn[i - self.n + 1 : i])
            if (*start, drawn[i]) in seen:
                free = [token for token in range(self.ids) if (*start, token) not in seen]
                if not free:
                    return drawn[:i]
                drawn[i] = free[rng.integers(len(free))]
            seen.add((*start, drawn[i]))
        return drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position(Task):
    """A string and a number; asked for is the token of the string at that position, counted from 0."""

    ids: int = 32
    longest: int = 256  # numbers up to this have ids, so that longer tests have the same vocabulary

    def __post_init__(self):
        self._require(2 <= self.length <= self.longest, f"has numbers for strings of 1 to {self.longest - 1} tokens")

    @property
    def vocab_size(self) -> int:
        """The tokens and the numbers."""
        return self.ids + self.longest

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        inputs[:, :-1] = rng.integers(self.ids, size=(n, self.length - 1))
        at = rng.integers(self.length - 1, size=n)
        inputs[:, -1] = self.ids + at
        targets[:, -1] = inputs[np.arange(n), at]
        return Examples(inputs, targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(Task):
    """A string of `shortest` to `longest` tokens, a separator and the string again; each of its tokens is asked for.

    A sequence has 2 * `longest` + 1 inputs at most, and ends in padding. The second string is an input as well: the
    model is told the right tokens before the one that it is asked for.
    """

    shortest: int
    longest: int
    ids: int = 26

    def __post_init__(self):
        self._require(1 <= self.shortest <= self.longest, "needs strings of at least one token")
        self._require(2 * self.longest + 1 <= self.length, "needs a length of at least twice the string and one more")

    @property
    def vocab_size(self) -> int:
        """The tokens, the separator and padding."""
        return self.ids + 2

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        inputs[:] = self.ids + 1
        for row, target in zip(inputs, targets, strict=True):
            size = int(rng.integers(self.shortest, self.longest + 1))
            string = rng.integers(self.ids, size=size)
            row[:size], row[size], row[size + 1 : 2 * size + 1] = string, self.ids, string
            target[size : 2 * size] = string
        return Examples(inputs, targets)


@functools.cache
def _products() -> np.ndarray:
    """The number of the product of two permutations of five things, int32 [120, 120]: first a, then b is [b, a]."""
    all_of_them = list(itertools.permutations(range(5)))
    number = {permutation: i for i, permutation in enumerate(all_of_them)}
    table = [[number[tuple(b[i] for i in a)] for a in all_of_them] for b in all_of_them]
    return np.array(table, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class S5(Task):
    """Permutations of five things; asked for at each is the product of all so far."""

    @property
    def vocab_size(self) -> int:
        """The 120 permutations."""
        return 120

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs = rng.integers(self.vocab_size, size=(n, self.length)).astype(np.int32)
        targets = inputs.copy()
        for i in range(1, self.length):
            targets[:, i] = _products()[inputs[:, i], targets[:, i - 1]]
        return Examples(inputs, targets)
