"""Find a word's k-th successor on a cycle: a small version of Depo.

Depo is from "Physics of Language Models: Part 4.1" (arXiv 2512.17351). Depo has up to 375 words of several tokens,
includes the answers in the input, and some of its cycles have fewer words than hops. Here a word is one token, answers
are not in the input, and the cycle is longer than any path.
"""

import dataclasses

import numpy as np

from seqjax.evals.recall.tasks import IGNORED, Examples, Task, TaskSetup, distinct


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hops(Task):
    """The edges (word, next word) of a cycle, then queries (k, word).

    The edges are in random order, and padding follows the queries. At each query's word, the answer is the word k edges
    further. A cycle has n words, from `shortest` to `longest`, with probability proportional to 1 / (n +
    sqrt(`longest`)). k is uniform over `hops`. The queried words are distinct. With `unchained`, paths with edges
    listed in path order are not queried, because one pass could follow them.
    """

    order = 62
    question = "the word k edges further"
    is_recall = False

    shortest: int
    longest: int
    hops: tuple[int, ...] = (1, 2, 3, 4)
    queries: int = 8
    unchained: bool = False
    ids: int = 64
    most: int = 4  # the largest number with an id

    def __post_init__(self):
        self._require(self.queries <= self.shortest <= self.longest <= self.ids, "needs `queries` to `ids` words")
        self._require(min(self.hops) >= 1 and max(self.hops) <= self.most, "needs `hops` from 1 to `most`")
        self._require(max(self.hops) < self.shortest, "needs cycles longer than its paths")
        self._require(not self.unchained or min(self.hops) > 1, "needs paths of several edges")
        self._require(2 * (self.longest + self.queries) <= self.length, "needs a longer length for its queries")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""

        def of(words: int, k: int, *, unchained: bool = False) -> "Hops":
            return cls(length=2 * words + 16, shortest=words, longest=words, hops=(k,), unchained=unchained)

        tests = {f"{k} of {n}": of(n, k) for n, k in ((8, 1), (24, 1), (24, 2))}
        tests["2 of 24, against the order"] = of(24, 2, unchained=True)
        tests |= {f"{k} of {n}": of(n, k) for n, k in ((24, 3), (24, 4), (32, 2), (48, 2))}
        train = (cls(length=64, shortest=8, longest=24),)
        setup = TaskSetup(steps=4_000, train=train, tests=tests, own="2 of 24", easy="1 of 8", depth=2)
        return {"small": setup}

    @property
    def vocab_size(self) -> int:
        """Words and numbers."""
        return self.ids + self.most

    @property
    def answers(self) -> int:
        """One per query."""
        return self.queries

    @property
    def floor(self) -> float:
        """A random other word on the cycle."""
        words, shares = self._words()
        return float(shares @ (1 / (words - 1)))

    def _words(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the possible cycle lengths in words, and their probabilities."""
        words = np.arange(self.shortest, self.longest + 1)
        weights = 1 / (words + self.longest**0.5)
        return words, weights / weights.sum()

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        words, shares = self._words()
        sizes = rng.choice(words, size=(n, 1), p=shares)
        cycles = distinct(rng, n, self.longest, below=self.ids)
        edge_ids, rows = np.arange(self.longest), np.arange(n)[:, None]
        exists = edge_ids < sizes
        ranks = np.where(exists, rng.random(exists.shape), 1).argsort(1).argsort(1)  # each edge's place in the list
        row, edge = np.nonzero(exists)
        at = 2 * ranks[row, edge]
        inputs[row, at], inputs[row, at + 1] = cycles[row, edge], cycles[row, (edge + 1) % sizes[row, 0]]
        k = rng.choice(self.hops, size=(n, self.longest))
        first = rng.random(exists.shape) + 2 * ~exists  # the smallest are queried; below 1 they are scored
        if self.unchained:
            follows = ranks[rows, (edge_ids + 1) % sizes] > ranks  # the path's next edge is listed later
            chained = np.ones_like(exists)
            for i in range(max(self.hops) - 1):
                chained &= follows[rows, (edge_ids + i) % sizes] | (i >= k - 1)
            first += chained
        queried = first.argsort(1)[:, : self.queries]
        at = 2 * (sizes + np.arange(self.queries))
        inputs[rows, at], inputs[rows, at + 1] = self.ids + k[rows, queried] - 1, cycles[rows, queried]
        answers = cycles[rows, (queried + k[rows, queried]) % sizes]
        targets[rows, at + 1] = np.where(first[rows, queried] < 1, answers, IGNORED)
        return Examples(inputs, targets)
