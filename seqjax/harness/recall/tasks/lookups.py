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

    @property
    def answers(self) -> int:
        """One for each key."""
        return self.pairs

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        keys = 1 + distinct(rng, n, self.pairs, below=self.ids // 2 - 1)
        values = self.ids // 2 + distinct(rng, n, self.pairs, below=self.ids // 2)
        context = 2 * self.pairs
        inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
        inputs[:, context:] = rng.integers(self.ids, size=(n, self.length - context), dtype=np.int32)
        places = np.arange(1, (self.length - context) // 2 + 1)
        # The smallest of exponential variates over the shares p are a sample without replacement, and their order is
        # that of drawing one by one: the first pair is likely to be asked for first.
        clocks = rng.standard_exponential((n, len(places))) * places ** (1 - self.power)
        found = subsets(clocks, self.pairs)
        found = np.take_along_axis(found, np.argsort(np.take_along_axis(clocks, found, 1)), 1)
        at = context + 2 * found
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
    """A string, a separator and `queries` times `n` tokens in a row of the string; asked for is what followed each.

    No n-gram of the string appears twice, so there is one answer; queries are different ones.
    """

    ids: int = 32
    n: int = 2
    queries: int = 1

    def __post_init__(self):
        self._require(self.queries >= 1, "needs a query")
        self._require(self._string >= self.n + self.queries, "is too short for its n-grams")
        # Not half of all n-grams, so that drawing anew ends soon.
        self._require(self._string <= self.ids**self.n // 2, "needs more ids for n-grams that appear once")

    @property
    def _string(self) -> int:
        return self.length - 1 - self.n * self.queries

    @property
    def vocab_size(self) -> int:
        """The tokens and the separator."""
        return self.ids + 1

    @property
    def answers(self) -> int:
        """One for each query."""
        return self.queries

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        strings, again = np.empty((n, self._string), np.int64), np.arange(n)
        while len(again):
            strings[again], complete = self._strings(rng, len(again))
            again = again[~complete]
        starts = distinct(rng, n, self.queries, below=self._string - self.n)
        asked = np.take_along_axis(strings[:, None], starts[:, :, None] + np.arange(self.n + 1), 2)
        inputs[:, : self._string], inputs[:, self._string] = strings, self.ids
        inputs[:, self._string + 1 :] = asked[:, :, : self.n].reshape(n, -1)
        targets[:, self._string + self.n :: self.n] = asked[:, :, self.n]
        return Examples(inputs, targets)

    def _strings(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw strings [B, T] in which no n-gram is there twice, and which of them [B] found a token at every place."""
        drawn = rng.integers(self.ids, size=(self._string, n))
        seen = np.zeros((n, self.ids ** (self.n - 1), self.ids), bool)
        complete, rows = np.ones(n, bool), np.arange(n)
        before = np.zeros(n, np.int64)  # the last n - 1 tokens as one number
        for i, token in enumerate(drawn):
            if i >= self.n - 1:
                repeats = rows[seen[rows, before, token]]
                if len(repeats):
                    # Instead of a token that would repeat an n-gram, any other one that would not.
                    free = ~seen[repeats, before[repeats]]
                    complete[repeats] &= free.any(1)
                    token[repeats] = np.argmax(free * rng.random(free.shape), axis=1)
                seen[rows, before, token] = True
            before = (before * self.ids + token) % self.ids ** (self.n - 1)
        return drawn.T, complete


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
