"""Find a token's position, the reverse of `position`.

The task follows Retrievit (arXiv 2603.02874). Retrievit has strings of 200 tokens, with one query before the string and
200 possible answers. Here lengths differ and several queries follow the string, so the distance from a query to its
token does not determine the position.
"""

import dataclasses

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup, distinct


@dataclasses.dataclass(frozen=True, kw_only=True)
class Where(Task):
    """Distinct tokens, a mark, and `queries` of the tokens again.

    The string has `shortest` to `longest` tokens. The answers are the positions of the queried tokens. Positions are
    counted from 0. Sequences are padded with marks.
    """

    order = 80
    question = "the position of a token"

    shortest: int
    longest: int
    queries: int = 8
    ids: int = 128
    numbers: int = 64

    def __post_init__(self):
        self._require(self.queries <= self.shortest <= self.longest, "needs `queries` <= `shortest` <= `longest`")
        self._require(self.longest <= min(self.numbers, self.ids), "needs ids and numbers for its longest string")
        self._require(self.longest + 1 + self.queries <= self.length, "needs a longer length for its queries")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""
        tests = {str(n): cls(length=n + 9, shortest=n, longest=n) for n in (16, 32, 64)}
        train = (cls(length=73, shortest=8, longest=64),)
        return {"small": TaskSetup(steps=2_000, train=train, tests=tests, own="64", easy="16")}

    @property
    def vocab_size(self) -> int:
        """Tokens, the mark and numbers."""
        return self.ids + 1 + self.numbers

    @property
    def answers(self) -> int:
        """One per query."""
        return self.queries

    @property
    def floor(self) -> float:
        """A random position in the string."""
        return float(np.mean(1 / np.arange(self.shortest, self.longest + 1)))

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        sizes = rng.integers(self.shortest, self.longest + 1, size=n)
        strings = distinct(rng, n, self.longest, below=self.ids)
        inputs[:] = self.ids
        row, column = np.nonzero(np.arange(self.longest) < sizes[:, None])
        inputs[row, column] = strings[row, column]
        # Query random positions: the smallest random scores; positions past the string's end have infinite scores.
        scores = np.where(np.arange(self.longest) < sizes[:, None], rng.random((n, self.longest)), np.inf)
        queried = np.argsort(scores, axis=1)[:, : self.queries]
        rows = np.arange(n)[:, None]
        at = sizes[:, None] + 1 + np.arange(self.queries)
        inputs[rows, at] = strings[rows, queried]
        targets[rows, at] = self.ids + 1 + queried
        return Examples(inputs, targets)
