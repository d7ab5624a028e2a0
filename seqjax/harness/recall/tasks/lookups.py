"""Tasks that ask for what stood beside something: a key, a marker, an n-gram or a position."""

import dataclasses

import numpy as np

from seqjax.harness.recall.tasks.base import Examples, Task, distinct, subsets


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
        keys = 1 + distinct(rng, n, self.pairs, below=self.ids // 2 - 1)
        values = self.ids // 2 + distinct(rng, n, self.pairs, below=self.ids // 2)
        context = 2 * self.pairs
        inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
        inputs[:, context:] = rng.integers(self.ids, size=(n, self.length - context))
        places = np.arange(1, (self.length - context) // 2 + 1)
        # The largest of log p + Gumbel noise are a sample without replacement in the shares p.
        scores = (self.power - 1) * np.log(places) + rng.gumbel(size=(n, len(places)))
        at = context + 2 * subsets(-scores, self.pairs)
        np.put_along_axis(inputs, at, keys, 1)
        np.put_along_axis(targets, at, values, 1)
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
