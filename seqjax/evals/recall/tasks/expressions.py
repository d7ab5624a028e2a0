"""Evaluate arithmetic expressions: a small version of Mano.

Mano is from "Physics of Language Models: Part 4.1" (arXiv 2512.17351). Mano also has products, which make zero more
likely, synonyms, and a length token before each expression, which carries no information at untrained lengths. Here
expressions only have sums and differences, so all values are equally likely.
"""

import dataclasses

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expressions(Task):
    """Expressions in prefix notation, each followed by a mark.

    The answer at the mark is the expression's value modulo `numbers`. An expression has `shortest` to `longest` random
    operators, plus or minus. With L operators, the left operand of the first has a uniform number from 0 to L - 1.
    Sequences are padded with marks.
    """

    order = 64
    question = "the value of an expression"
    is_recall = False

    shortest: int
    longest: int
    queries: int = 6
    numbers: int = 7

    def __post_init__(self):
        self._require(0 <= self.shortest <= self.longest, "needs 0 <= `shortest` <= `longest`")
        self._require(self.queries * (2 * self.longest + 2) <= self.length, "needs a longer length for its expressions")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""
        tests = {str(n): cls(length=12 * n + 12, shortest=n, longest=n) for n in (1, 4, 6, 8)}
        train = (cls(length=60, shortest=1, longest=4),)
        return {"small": TaskSetup(steps=6_000, train=train, tests=tests, own="4", easy="1", depth=2)}

    @property
    def vocab_size(self) -> int:
        """Numbers, plus, minus and the mark."""
        return self.numbers + 3

    @property
    def answers(self) -> int:
        """One per expression."""
        return self.queries

    @property
    def floor(self) -> float:
        """A random number: sums and differences of uniform numbers are uniform."""
        return 1 / self.numbers

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        inputs[:] = self.numbers + 2
        sizes = rng.integers(self.shortest, self.longest + 1, size=(n, self.queries))
        marks = np.cumsum(2 * sizes + 2, axis=1) - 1
        starts, rows = (marks - 2 * sizes - 1).ravel(), np.arange(n).repeat(self.queries)
        # Each expression has a stack of pending parts: the part's number of operators, and its sign in the sum (1, -1).
        parts = np.zeros((2, sizes.size, self.longest + 1), np.int64)
        parts[:, :, 0] = sizes.ravel(), np.ones(sizes.size)
        height, values = np.ones(sizes.size, np.int64), np.zeros(sizes.size, np.int64)
        for i in range(2 * self.longest + 1):
            active = np.nonzero(height)[0]
            height[active] -= 1
            size, sign = parts[:, active, height[active]]
            minus, number = rng.integers(2, size=len(active)), rng.integers(self.numbers, size=len(active))
            inputs[rows[active], starts[active] + i] = np.where(size, self.numbers + minus, number)
            values[active] += np.where(size, 0, sign * number)
            split = size > 0
            active, size, sign, minus = active[split], size[split], sign[split], minus[split]
            left = rng.integers(size)
            parts[:, active, height[active]] = size - 1 - left, sign * (1 - 2 * minus)
            parts[:, active, height[active] + 1] = left, sign  # on top, because the left operand comes first
            height[active] += 2
        np.put_along_axis(targets, marks, values.reshape(sizes.shape) % self.numbers, 1)
        return Examples(inputs, targets)
