"""The task that asks for a state: the product of permutations."""

import dataclasses
import functools
import itertools

import numpy as np

from seqjax.harness.recall.tasks.base import Examples, Task


@functools.cache
def _products() -> np.ndarray:
    """The number of the product of two permutations of five things, int32 [120, 120]: first a, then b is [b, a]."""
    all_of_them = list(itertools.permutations(range(5)))
    number = {permutation: i for i, permutation in enumerate(all_of_them)}
    table = [[number[tuple(b[i] for i in a)] for a in all_of_them] for b in all_of_them]
    return np.array(table, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class S5(Task):
    """Permutations of five things; asked for at each is the product of all so far."""

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
        inputs = rng.integers(self.vocab_size, size=(n, self.length)).astype(np.int32)
        targets = inputs.copy()
        for i in range(1, self.length):
            targets[:, i] = _products()[inputs[:, i], targets[:, i - 1]]
        return Examples(inputs, targets)
