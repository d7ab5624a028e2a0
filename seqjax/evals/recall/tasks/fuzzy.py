"""Look up values of multi-token keys.

This is a small version of MAD's fuzzy in-context recall (arXiv 2403.17844). MAD also queries keys that never appeared,
and has few queries per sequence. Here each queried key occurs twice and its value is predicted token by token. Half of
the keys differ from another key only in the last token.
"""

import dataclasses
import math

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fuzzy(Task):
    """`pairs` (key, value) pairs, then `queries` pairs again in random order.

    Keys have 2 or 3 tokens, values 1 to 3. The answers are the first `tokens` value tokens in each repeated pair, given
    the previous tokens. No key is a prefix of another key. Key ids are below `ids`; value ids are the next `ids` ids.
    Padding is at the end.
    """

    order = 14
    question = "values of multi-token keys"

    pairs: int
    queries: int
    tokens: int = 3
    ids: int = 16

    def __post_init__(self):
        self._require(
            1 <= self.queries <= self.pairs and 1 <= self.tokens <= 3, "needs pairs, queries and 1 to 3 tokens"
        )
        # Few keys per id, so that redrawing rejected keys ends soon.
        self._require(8 * self.pairs <= self.ids**2, "needs more ids for keys that are not prefixes of each other")
        self._require(6 * (self.pairs + self.queries) <= self.length, "needs a longer length for its pairs")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""

        def of(pairs: int, queries: int, tokens: int = 3) -> "Fuzzy":
            return cls(length=6 * (pairs + queries), pairs=pairs, queries=queries, tokens=tokens)

        # With one query per sequence, a sequence is fully right if its whole value is.
        tests = {"4, first token": of(4, 4, 1), "12, first token": of(12, 12, 1), "12, one value": of(12, 1)}
        tests["24, first token"] = of(24, 24, 1)
        setup = TaskSetup(
            steps=4_000,
            train=(of(4, 4), of(12, 12)),
            tests=tests,
            own="12, first token",
            easy="4, first token",
            depth=2,
        )
        return {"small": setup}

    @property
    def vocab_size(self) -> int:
        """Key tokens and value tokens."""
        return 2 * self.ids

    @property
    def answers(self) -> int:
        """One per queried value token."""
        return self.tokens * self.queries

    @property
    def floor(self) -> float:
        """For first tokens: guess the most frequent first value token in the sequence."""
        # P tokens are drawn from V ids. The probability that no id occurs more than m times is P! / V^P times the
        # coefficient of x^P in (sum over j <= m of x^j / j!)^V.
        expected = 0.0  # expected count of the most frequent id
        for m in range(self.pairs):
            terms = [1 / math.factorial(j) for j in range(m + 1)]
            coefficient = np.polynomial.polynomial.polypow(terms, self.ids)[self.pairs : self.pairs + 1].sum()
            expected += 1 - math.factorial(self.pairs) / self.ids**self.pairs * coefficient
        return expected / self.pairs

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        keys, redraw = np.empty((n, self.pairs, 3), np.int64), np.arange(n)
        sizes = np.empty((n, self.pairs), np.int64)
        while len(redraw):
            keys[redraw], sizes[redraw], complete = self._keys(rng, len(redraw))
            redraw = redraw[~complete]
        values = self.ids + rng.integers(self.ids, size=keys.shape)
        ends = np.stack((sizes, rng.integers(1, 4, size=sizes.shape)), 2)
        pairs = np.stack((keys, values), 2)  # [B, P, 2, 3]: three places each for a key and a value
        exists = np.arange(3) < ends[..., None]
        pair_order, query_order = (rng.random(sizes.shape).argsort(1) for _ in range(2))
        order = np.concatenate((pair_order, query_order[:, : self.queries]), 1)
        rows = np.arange(n)[:, None]
        tokens, exists = (a[rows, order].reshape(n, -1) for a in (pairs, exists))
        scored = np.zeros((self.pairs + self.queries, 2, 3), bool)
        scored[self.pairs :, 1, : self.tokens] = True
        at = np.cumsum(exists, axis=1) - 1  # position in the sequence, after removing unused slots
        row, slot = np.nonzero(exists)
        inputs[row, at[row, slot]] = tokens[row, slot]
        row, slot = np.nonzero(exists & scored.ravel())
        targets[row, at[row, slot] - 1] = tokens[row, slot]
        return Examples(inputs, targets)

    def _keys(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw keys [B, P, 3], their sizes [B, P] and a mask [B] of valid draws.

        In a valid draw, no key is another key's prefix. The second quarter of the keys copies the first quarter, except
        for the last token.
        """
        quarter = self.pairs // 4
        keys, sizes = rng.integers(self.ids, size=(n, self.pairs, 3)), rng.integers(2, 4, size=(n, self.pairs))
        siblings = keys[:, quarter : 2 * quarter]
        siblings[:], sizes[:, quarter : 2 * quarter] = keys[:, :quarter], sizes[:, :quarter]
        last = sizes[:, :quarter, None] - 1
        other = 1 + rng.integers(self.ids - 1, size=last.shape)
        np.put_along_axis(siblings, last, (np.take_along_axis(siblings, last, 2) + other) % self.ids, 2)
        # Keys that differ in their first two tokens are not prefixes of each other. Siblings of three tokens share
        # these two tokens, so their entries are made distinct.
        starts = keys[:, :, 0] * self.ids + keys[:, :, 1]
        starts[:, quarter : 2 * quarter] -= self.ids**2 * (1 + np.arange(quarter)) * (last[:, :, 0] == 2)
        ordered = np.sort(starts, axis=1)
        return keys, sizes, (ordered[:, 1:] != ordered[:, :-1]).all(1)
