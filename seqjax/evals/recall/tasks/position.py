"""Recall the token at a given position; the content does not help to find it."""

import dataclasses

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position(Task):
    """A string and a number; the answer is the token at that position.

    Positions are counted from 0.
    """

    order = 70
    question = "the token at a given position"

    ids: int = 32
    longest: int = 256  # number of ids for positions; longer tests keep the same vocabulary

    def __post_init__(self):
        self._require(2 <= self.length <= self.longest, f"needs a string of 1 to {self.longest - 1} tokens")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""
        train = tuple(cls(length=n) for n in (32, 64, 128))
        return {
            "small": TaskSetup(steps=2_000, train=train, tests={str(task.length): task for task in train}, own="128")
        }

    @property
    def vocab_size(self) -> int:
        """Tokens and numbers."""
        return self.ids + self.longest

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        inputs[:, :-1] = rng.integers(self.ids, size=(n, self.length - 1))
        at = rng.integers(self.length - 1, size=n)
        inputs[:, -1] = self.ids + at
        targets[:, -1] = inputs[np.arange(n), at]
        return Examples(inputs, targets)
