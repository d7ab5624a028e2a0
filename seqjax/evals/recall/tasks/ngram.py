"""Recall the token after an n-gram.

This is n-gram lookup from Jelassi et al., "Repeat After Me" (arXiv 2402.01032).
"""

import dataclasses

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup, distinct


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ngram(Task):
    """A string, a separator and `queries` n-grams from the string.

    Each answer is the token after the n-gram in the string. No n-gram occurs twice in the string, so the answer is
    unique. All queries differ.
    """

    order = 40
    question = "the token after a bigram"

    ids: int = 32
    n: int = 2
    queries: int = 1

    def __post_init__(self):
        self._require(self.queries >= 1, "needs a query")
        self._require(self._string >= self.n + self.queries, "needs a longer length for its n-grams")
        # At most half of all n-grams, so that redrawing ends soon.
        self._require(self._string <= self.ids**self.n // 2, "needs more ids for n-grams that appear once")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""
        train = tuple(cls(length=n, queries=n // 8) for n in (16, 32, 64, 128))
        tests = {str(n): cls(length=n, queries=n // 8) for n in (64, 128, 256)}
        return {"small": TaskSetup(steps=4_000, train=train, tests=tests, own="128")}

    @property
    def _string(self) -> int:
        return self.length - 1 - self.n * self.queries

    @property
    def vocab_size(self) -> int:
        """Tokens and the separator."""
        return self.ids + 1

    @property
    def answers(self) -> int:
        """One per query."""
        return self.queries

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        strings, redraw = np.empty((n, self._string), np.int64), np.arange(n)
        while len(redraw):
            strings[redraw], complete = self._strings(rng, len(redraw))
            redraw = redraw[~complete]
        starts = distinct(rng, n, self.queries, below=self._string - self.n)
        queried = np.take_along_axis(strings[:, None], starts[:, :, None] + np.arange(self.n + 1), 2)
        inputs[:, : self._string], inputs[:, self._string] = strings, self.ids
        inputs[:, self._string + 1 :] = queried[:, :, : self.n].reshape(n, -1)
        targets[:, self._string + self.n :: self.n] = queried[:, :, self.n]
        return Examples(inputs, targets)

    def _strings(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw strings [B, T] without repeated n-grams, and a mask [B] of valid draws."""
        drawn = rng.integers(self.ids, size=(self._string, n))
        seen = np.zeros((n, self.ids ** (self.n - 1), self.ids), bool)
        complete, rows = np.ones(n, bool), np.arange(n)
        before = np.zeros(n, np.int64)  # the last n - 1 tokens as one number
        for i, token in enumerate(drawn):
            if i >= self.n - 1:
                repeats = rows[seen[rows, before, token]]
                if len(repeats):
                    # Replace a token that would repeat an n-gram with a random token that would not.
                    free = ~seen[repeats, before[repeats]]
                    complete[repeats] &= free.any(1)
                    token[repeats] = np.argmax(free * rng.random(free.shape), axis=1)
                seen[rows, before, token] = True
            before = (before * self.ids + token) % self.ids ** (self.n - 1)
        return drawn.T, complete
