"""Recall the token after a marker.

This is the induction-heads task from Gu and Dao, "Mamba" (arXiv 2312.00752, section 4.1.2).
"""

import dataclasses

import numpy as np

from seqjax.evals.recall.tasks import Examples, Task, TaskSetup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Induction(Task):
    """Random tokens with a marker at a random place and another at the end.

    The answer at the end is the token after the first marker.
    """

    order = 30
    question = "what followed the marker"

    ids: int = 16

    def __post_init__(self):
        self._require(self.length >= 3, "needs three tokens")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""
        return {
            "demo": TaskSetup(
                steps=400,
                train=tuple(cls(length=n) for n in (8, 16, 32, 64)),
                tests={str(n): cls(length=n) for n in (64, 128, 256)},
                own="64",
            ),
            "small": TaskSetup(
                steps=2_000,
                train=tuple(cls(length=n) for n in (32, 64, 128, 256)),
                tests={str(n): cls(length=n) for n in (64, 256, 1024, 2048)},
                own="256",
            ),
        }

    @property
    def vocab_size(self) -> int:
        """Tokens and the marker."""
        return self.ids + 1

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        inputs[:] = rng.integers(self.ids, size=inputs.shape)
        at = rng.integers(self.length - 2, size=n)
        inputs[np.arange(n), at] = inputs[:, -1] = self.ids
        targets[:, -1] = inputs[np.arange(n), at + 1]
        return Examples(inputs, targets)
