"""Values of keys, many queries per sequence: Arora et al., "Zoology" (arXiv 2312.04927, section 3.2).

At `small` the sequences are those of zoology's configs for figure 2 of "Based" (arXiv 2402.18668;
github.com/HazyResearch/zoology, commit d88d6f5). They have 8,192 ids, 4 to 64 pairs in 64 to 256 tokens for training in
batches of 256, and 4 to 256 pairs in 64 to 1,024 tokens for tests. docs/recall.md lists the differences.
"""

import dataclasses

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup, distinct, subsets


@dataclasses.dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """`pairs` keys with their values, then each key once more among noise; the answer there is its value.

    The gaps between a pair and its query follow a power law, so most queries come early; ids below `ids` / 2 are keys,
    the others values, and noise is any id. As in zoology, the value itself does not appear after the query.
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
        # zoology trains on 100,000 sequences of the first kind and 20,000 of each other one.
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
                    "Published: figure 2 of Based (arXiv 2402.18668) has the mean of these seven tests against the "
                    "bytes of the state at 1,024 tokens, as a picture without numbers, of models without MLPs and "
                    "positions that see up to 5.8 million sequences."
                ),
            ),
        }

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.ids

    @property
    def answers(self) -> int:
        """One for each key."""
        return self.pairs

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        keys = 1 + distinct(rng, n, self.pairs, below=self.ids // 2 - 1)
        values = self.ids // 2 + distinct(rng, n, self.pairs, below=self.ids // 2)
        context = 2 * self.pairs
        inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
        inputs[:, context:] = rng.integers(self.ids, size=(n, self.length - context), dtype=np.int32)
        places = np.arange(1, (self.length - context) // 2 + 1)
        # The smallest of exponential variates over the shares p are a sample without replacement, in the order of
        # drawing one by one: the first pair is likely to be queried first.
        clocks = rng.standard_exponential((n, len(places))) * places ** (1 - self.power)
        found = subsets(clocks, self.pairs)
        found = np.take_along_axis(found, np.argsort(np.take_along_axis(clocks, found, 1)), 1)
        at = context + 2 * found
        np.put_along_axis(inputs, at, keys, 1)
        np.put_along_axis(targets, at, values, 1)
        return Examples(inputs, targets)
