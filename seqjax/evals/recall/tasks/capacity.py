"""Measure how many facts a model stores in its parameters: a small Capo task.

Capo is from "Physics of Language Models: Part 4.1" (arXiv 2512.17351), where facts are biographies in sentences. Here a
fact is a two-token name, an attribute and its value, from a table that training and tests share. Each person occurs at
most once per sequence, so the context never contains the answer. Bits per parameter are the measure in "Physics of
Language Models: Part 3.3" (arXiv 2404.05405).
"""

import dataclasses
import functools

import numpy as np

from seqjax.evals.recall.tasks import Batch, Examples, Task, TaskSetup, distinct

NAMES = 256  # name ids; a person's name has two
ATTRIBUTES = 4
VALUES = 64  # values per attribute
TABLE = 0  # seed of the table of facts


@functools.cache
def table(people: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct names and the attribute values of `people` people.

    Names are int64 [N, 2], values int64 [N, ATTRIBUTES].
    """
    rng = np.random.default_rng(TABLE)
    names = rng.permutation(NAMES**2)[:people]
    return np.stack((names // NAMES, names % NAMES), 1), rng.integers(VALUES, size=(people, ATTRIBUTES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity(Task):
    """Facts: a two-token name, an attribute and its value.

    The answer at the attribute is the value. The table of `people` persons is fixed. A sequence has distinct people
    from the first `among` entries.
    """

    order = 68
    question = "facts learned in training"
    is_recall = False
    score = "bits per parameter"

    people: int
    among: int

    def __post_init__(self):
        self._require(self.length % 4 == 0 and self.length // 4 <= self.among, "needs 1 to `among` facts of 4 tokens")
        self._require(self.among <= self.people <= NAMES**2, "needs a table with at least `among` people")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""

        def of(people: int, among: int) -> "Capacity":
            return cls(length=64, people=people, among=among)

        def setup(people: int, known: int, *, steps: int) -> TaskSetup:
            every, best_known = of(people, people), of(people, known)
            tests = {f"{known:,} of {people:,}": best_known, f"{people:,}": every}
            train = (*[every] * 7, best_known)
            return TaskSetup(steps=steps, train=train, tests=tests, own=f"{people:,}", easy=next(iter(tests)))

        # With batches of 256, `small` shows all facts 100 times each, and facts about 1,000 people another 575 times.
        return {"demo": setup(500, 100, steps=800), "small": setup(40_000, 1_000, steps=4_500)}

    @property
    def vocab_size(self) -> int:
        """Name tokens, attributes and values."""
        return NAMES + ATTRIBUTES + VALUES

    @property
    def answers(self) -> int:
        """One per fact."""
        return self.length // 4

    @property
    def floor(self) -> float:
        """A random value."""
        return 1 / VALUES

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        names, values = table(self.people)
        people = distinct(rng, n, self.answers, below=self.among)
        attributes = rng.integers(ATTRIBUTES, size=people.shape)
        inputs[:, 0::4], inputs[:, 1::4] = np.moveaxis(names[people], 2, 0)
        inputs[:, 2::4] = NAMES + attributes
        inputs[:, 3::4] = targets[:, 2::4] = NAMES + ATTRIBUTES + values[people, attributes]
        return Examples(inputs, targets)

    def scores(self, batch: Batch, bits: np.ndarray, *, parameters: int) -> np.ndarray:
        """Return the known bits per fact, times the number of facts, per parameter.

        A value has log2(64) = 6 bits; the known bits are 6 - `bits`. A confident wrong answer scores below zero:
        clipping at zero would reward noise in the mean over answers.
        """
        del batch
        return ATTRIBUTES * self.among / parameters * (np.log2(VALUES) - bits)
