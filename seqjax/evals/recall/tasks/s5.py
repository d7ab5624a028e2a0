"""The product so far of permutations of five things: Merrill et al., "The Illusion of State" (arXiv 2404.08819).

It needs a state, which a fixed number of attention layers cannot keep for long sequences. The paper gives any
permutation; those of the training and the tests are swaps of two.
"""

import dataclasses
import functools
import itertools

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup

PERMUTATIONS = list(itertools.permutations(range(5)))  # an id is the number in this list


@functools.cache
def _products() -> np.ndarray:
    """The id of the product of two permutations, int32 [120, 120]: first a, then b is [b, a]."""
    number = {permutation: i for i, permutation in enumerate(PERMUTATIONS)}
    table = [[number[tuple(b[i] for i in a)] for a in PERMUTATIONS] for b in PERMUTATIONS]
    return np.array(table, np.int32)


@functools.cache
def _moving(most: int) -> np.ndarray:
    """The ids of permutations that leave all but `most` things in their places, int32 [N]."""
    moved = [sum(i != place for i, place in enumerate(permutation)) for permutation in PERMUTATIONS]
    return np.array([i for i, n in enumerate(moved) if n <= most], np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class S5(Task):
    """Permutations of five things; the answer at each is the product of all so far.

    The inputs move at most `moved` things: with 2 they are ten swaps and the identity, whose products are all 120
    permutations; with 5 they are any permutation.
    """

    order = 60
    question = "the product of permutations"
    is_recall = False

    moved: int = 2

    def __post_init__(self):
        self._require(2 <= self.moved <= 5, "needs to move 2 to 5 things")

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
        """One for each permutation."""
        return self.length

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs = rng.choice(_moving(self.moved), size=(n, self.length))
        targets = inputs.copy()
        for i in range(1, self.length):
            targets[:, i] = _products()[inputs[:, i], targets[:, i - 1]]
        return Examples(inputs, targets)
