"""Track the product of permutations of five items.

The task is from Merrill et al., "The Illusion of State" (arXiv 2404.08819). The task needs a state, which a fixed
number of attention layers cannot track for long sequences. The paper's inputs are arbitrary permutations. Here,
training and tests only have swaps of two items and the identity.
"""

import dataclasses
import functools
import itertools

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup

PERMUTATIONS = list(itertools.permutations(range(5)))  # an id is an index into this list


@functools.cache
def _products() -> np.ndarray:
    """Return the ids of all products, int32 [120, 120].

    Entry [b, a] applies a first, then b.
    """
    number = {permutation: i for i, permutation in enumerate(PERMUTATIONS)}
    table = [[number[tuple(b[i] for i in a)] for a in PERMUTATIONS] for b in PERMUTATIONS]
    return np.array(table, np.int32)


@functools.cache
def _moving(most: int) -> np.ndarray:
    """Return the ids of the permutations that move at most `most` items, int32 [N]."""
    moved = [sum(i != place for i, place in enumerate(permutation)) for permutation in PERMUTATIONS]
    return np.array([i for i, n in enumerate(moved) if n <= most], np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class S5(Task):
    """Permutations of five items.

    The answer at each position is the product of all inputs so far. Each input moves at most `moved` items. With 2,
    inputs are the ten swaps and the identity, and their products reach all 120 permutations. With 5, inputs are
    arbitrary permutations.
    """

    order = 60
    question = "the product of permutations"
    is_recall = False

    moved: int = 2

    def __post_init__(self):
        self._require(2 <= self.moved <= 5, "needs `moved` from 2 to 5")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""
        return {
            "demo": TaskSetup(
                steps=800,
                train=tuple(cls(length=n) for n in (2, 4, 8)),
                tests={str(n): cls(length=n) for n in (4, 8, 16)},
                own="8",
            ),
            "small": TaskSetup(
                steps=2_000,
                train=tuple(cls(length=n) for n in (4, 8, 16, 32)),
                tests={str(n): cls(length=n) for n in (16, 32, 64, 128)},
                own="32",
            ),
        }

    @property
    def vocab_size(self) -> int:
        """The 120 permutations."""
        return 120

    @property
    def answers(self) -> int:
        """One per permutation."""
        return self.length

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs = rng.choice(_moving(self.moved), size=(n, self.length))
        targets = inputs.copy()
        for i in range(1, self.length):
            targets[:, i] = _products()[inputs[:, i], targets[:, i - 1]]
        return Examples(inputs, targets)
