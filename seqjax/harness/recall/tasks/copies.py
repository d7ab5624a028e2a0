"""Tasks that ask for many tokens in their order: a whole string, or the tokens among noise."""

import dataclasses

import numpy as np

from seqjax.harness.recall.tasks.base import Examples, Task, subsets


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

    @property
    def answers(self) -> int:
        """One for each token."""
        return self.tokens

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        noise, marker = self.ids, self.ids + 1
        context = self.length - self.tokens
        inputs[:, :context], inputs[:, context:] = noise, marker
        found = rng.integers(self.ids, size=(n, self.tokens))
        at = np.sort(subsets(rng.random((n, context)), self.tokens))
        np.put_along_axis(inputs, at, found, 1)
        targets[:, context:] = found
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

    @property
    def answers(self) -> int:
        """As many as the longest string has tokens."""
        return self.longest

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        sizes = rng.integers(self.shortest, self.longest + 1, size=n)
        strings = rng.integers(self.ids, size=(n, self.longest))
        row, place = np.nonzero(np.arange(self.longest) < sizes[:, None])
        inputs[:] = self.ids + 1
        inputs[np.arange(n), sizes] = self.ids
        inputs[row, place] = inputs[row, sizes[row] + 1 + place] = targets[row, sizes[row] + place] = strings[
            row, place
        ]
        return Examples(inputs, targets)
