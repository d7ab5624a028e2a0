"""What a model's parameters can hold: Capo of "Physics of Language Models: Part 4.1" (arXiv 2512.17351), small.

Capo has biographies in sentences. Here a fact is a name of two tokens, an attribute and its value, from a table that
training and tests share. No person comes twice in a sequence, so nothing can be looked up. Bits per parameter are
the measure of "Physics of Language Models: Part 3.3" (arXiv 2404.05405).
"""

import dataclasses
import functools

import numpy as np

from seqjax.evals.recall.tasks import Batch, Examples, Task, TaskSetup, distinct

NAMES = 256  # ids of the tokens of names, of which every person has two
ATTRIBUTES = 4
VALUES = 64  # of every attribute
TABLE = 0  # seed of the table


@functools.cache
def table(people: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the names of people, int64 [N, 2], which all differ, and their values, int64 [N, ATTRIBUTES]."""
    rng = np.random.default_rng(TABLE)
    names = rng.permutation(NAMES**2)[:people]
    return np.stack((names // NAMES, names % NAMES), 1), rng.integers(VALUES, size=(people, ATTRIBUTES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity(Task):
    """Facts, each a name of two tokens, an attribute and the value, which is the answer at the attribute.

    The people of a sequence differ and are any of the first `among` of a table of `people`, which is always the same.
    """

    order = 68
    question = "facts of the training"
    is_recall = False
    score = "bits per parameter"

    people: int
    among: int

    def __post_init__(self):
        self._require(self.length % 4 == 0 and self.length // 4 <= self.among, "needs four tokens a fact, and people")
        self._require(self.among <= self.people <= NAMES**2, "needs a table of all people")

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

        # With batches of 256, 100 times each fact of all, and 575 times those of the best known.
        return {"demo": setup(500, 100, steps=800), "small": setup(40_000, 1_000, steps=4_500)}

    @property
    def vocab_size(self) -> int:
        """The tokens of names, the attributes and the values."""
        return NAMES + ATTRIBUTES + VALUES

    @property
    def answers(self) -> int:
        """One for each fact."""
        return self.length // 4

    @property
    def floor(self) -> float:
        """Any value."""
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
        """Return the bits known of a fact, times all facts that may be asked for, per parameter.

        A guess takes 6 bits for a value, and a model that knows a fact takes fewer. A confident wrong answer takes
        more, so its score is negative: without that, the mean over answers would reward noise.
        """
        del batch
        return ATTRIBUTES * self.among / parameters * (np.log2(VALUES) - bits)
