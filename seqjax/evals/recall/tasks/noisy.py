"""Look up values of keys among noise.

This is a small version of MAD's noisy in-context recall (arXiv 2403.17844), as a variant of MQAR. MAD's noise has
separate ids, which are easy to ignore, and nearly all of its queries come within 32 tokens. Here noise is any id, as in
`mqar`, and queries come anywhere. Neither the ids nor a short window solve the task.
"""

import dataclasses

from seqjax.evals.recall.tasks import TaskSetup
from seqjax.evals.recall.tasks.mqar import MQAR


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noisy(MQAR):
    """`mqar` with uniformly distributed queries."""

    order = 12
    question = "values of keys among noise"

    power: float = 1.0

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""
        tests = {
            f"{k} in {n}": cls(length=n, pairs=k) for n, k in ((64, 4), (256, 8), (256, 32), (512, 32), (1024, 32))
        }
        train = (cls(length=64, pairs=4), cls(length=256, pairs=32))
        return {"small": TaskSetup(steps=4_000, train=train, tests=tests, own="32 in 256", easy="4 in 64")}

    @property
    def floor(self) -> float:
        """A random value from the sequence."""
        return 1 / self.pairs
