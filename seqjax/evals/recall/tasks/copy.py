"""Copy a whole string.

This is string copying from Jelassi et al., "Repeat After Me" (arXiv 2402.01032).
"""

import dataclasses

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(Task):
    """A string, a separator and the string again; the answers are its tokens.

    The string has `shortest` to `longest` tokens. A sequence has at most 2 * `longest` + 1 inputs before the padding.
    The second string is also an input, so each answer is conditioned on the right previous tokens.
    """

    order = 50
    question = "the whole string"

    shortest: int
    longest: int
    ids: int = 26

    def __post_init__(self):
        self._require(1 <= self.shortest <= self.longest, "needs strings of at least one token")
        self._require(2 * self.longest + 1 <= self.length, "needs a length of at least 2 * `longest` + 1")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""
        tests = {str(n): cls(length=2 * n + 2, shortest=n, longest=n) for n in (64, 128, 256)}
        train = (cls(length=130, shortest=8, longest=64),)
        return {"small": TaskSetup(steps=2_000, train=train, tests=tests, own="64")}

    @property
    def vocab_size(self) -> int:
        """String tokens, the separator and padding."""
        return self.ids + 2

    @property
    def answers(self) -> int:
        """One per token of the longest string."""
        return self.longest

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        sizes = rng.integers(self.shortest, self.longest + 1, size=n)
        strings = rng.integers(self.ids, size=(n, self.longest))
        row, column = np.nonzero(np.arange(self.longest) < sizes[:, None])
        inputs[:] = self.ids + 1
        inputs[np.arange(n), sizes] = self.ids
        inputs[row, column] = inputs[row, sizes[row] + 1 + column] = targets[row, sizes[row] + column] = strings[
            row, column
        ]
        return Examples(inputs, targets)
