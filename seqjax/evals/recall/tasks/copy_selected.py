"""Copy tokens that are scattered in noise.

This is selective copying from Gu and Dao, "Mamba" (arXiv 2312.00752, section 4.1.1).
"""

import dataclasses

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup, subsets


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopySelected(Task):
    """Tokens at random places in noise, then one marker per token.

    The answers at the markers are the tokens in order.
    """

    order = 20
    question = "tokens among noise, in order"

    tokens: int = 16
    ids: int = 16

    def __post_init__(self):
        self._require(2 * self.tokens <= self.length, "needs a length of at least twice the tokens")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""
        tests = {str(n): cls(length=n) for n in (256, 512, 1024)}
        return {"small": TaskSetup(steps=2_000, train=(cls(length=256),), tests=tests, own="256")}

    @property
    def vocab_size(self) -> int:
        """Tokens, noise and the marker."""
        return self.ids + 2

    @property
    def answers(self) -> int:
        """One per token."""
        return self.tokens

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        noise, marker = self.ids, self.ids + 1
        context = self.length - self.tokens
        inputs[:, :context], inputs[:, context:] = noise, marker
        selected = rng.integers(self.ids, size=(n, self.tokens))
        positions = np.sort(subsets(rng.random((n, context)), self.tokens))
        np.put_along_axis(inputs, positions, selected, 1)
        targets[:, context:] = selected
        return Examples(inputs, targets)
