"""Look up values of keys, with many queries per sequence (MQAR).

The task is from Arora et al., "Zoology" (arXiv 2312.04927, section 3.2). The size `small` has the sequences from
zoology's configs for figure 2 in "Based" (arXiv 2402.18668; github.com/HazyResearch/zoology, commit d88d6f5). They have
8,192 ids. Training has 4 to 64 pairs in 64 to 256 tokens and batches of 256; tests have 4 to 256 pairs in 64 to 1,024
tokens. docs/recall.md lists the differences.
"""

import dataclasses

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup, distinct, subsets


@dataclasses.dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """`pairs` (key, value) pairs, then each key again among noise.

    The answer at a repeated key is its value. Gaps between a pair and its query follow a power law, so most queries
    come early. Keys are ids below `ids` / 2 and values the ids above; noise is any id. As in zoology, the value does
    not follow the query.
    """

    order = 10
    question = "values of keys"

    pairs: int
    ids: int = 8192
    power: float = 0.01

    def __post_init__(self):
        self._require(4 * self.pairs <= self.length, "needs a length of at least four times the pairs")
        self._require(2 * self.pairs < self.ids, "needs more ids than twice the pairs")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""
        # zoology trains on 100,000 sequences of (64, 4) and on 20,000 of each other pair.
        train = ((64, 4),) * 5 + ((128, 8), (256, 16), (256, 32), (256, 64))
        tests = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
        return {
            "demo": TaskSetup(
                steps=800,
                train=tuple(cls(length=32, pairs=k, ids=32) for k in (1, 2, 4)),
                tests={f"{k} in {n}": cls(length=n, pairs=k, ids=32) for n, k in ((32, 2), (32, 4), (64, 8))},
                own="4 in 32",
            ),
            "small": TaskSetup(
                steps=4_000,
                train=tuple(cls(length=n, pairs=k) for n, k in train),
                tests={f"{k} in {n}": cls(length=n, pairs=k) for n, k in tests},
                own="64 in 256",
                published=(
                    "Published: figure 2 in Based (arXiv 2402.18668) plots the mean of these seven tests against the "
                    "state size in bytes at 1,024 tokens, without numbers. Its models have no MLPs and no position "
                    "encodings, and see up to 5.8 million sequences."
                ),
            ),
        }

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.ids

    @property
    def answers(self) -> int:
        """One per key."""
        return self.pairs

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        keys = 1 + distinct(rng, n, self.pairs, below=self.ids // 2 - 1)
        values = self.ids // 2 + distinct(rng, n, self.pairs, below=self.ids // 2)
        context = 2 * self.pairs
        inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
        inputs[:, context:] = rng.integers(self.ids, size=(n, self.length - context), dtype=np.int32)
        slots = np.arange(1, (self.length - context) // 2 + 1)
        # Exponential variates divided by weights p, sorted, are a weighted sample without replacement in drawing order.
        # The first pair is therefore likely to be queried first.
        arrivals = rng.standard_exponential((n, len(slots))) * slots ** (1 - self.power)
        chosen = subsets(arrivals, self.pairs)
        chosen = np.take_along_axis(chosen, np.argsort(np.take_along_axis(arrivals, chosen, 1)), 1)
        positions = context + 2 * chosen
        np.put_along_axis(inputs, positions, keys, 1)
        np.put_along_axis(targets, positions, values, 1)
        return Examples(inputs, targets)
