"""What all tasks have, and drawing without replacement."""

import abc
import dataclasses
from typing import NamedTuple

import numpy as np

IGNORED = -1  # a target at a position where nothing is asked


class Examples(NamedTuple):
    """Inputs and targets, both int32 [B, T]; a target is `IGNORED` or the id that the model is to give there."""

    inputs: np.ndarray
    targets: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """What all tasks have: `length` inputs per sequence, with ids below `vocab_size`."""

    length: int

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def answers(self) -> int:
        """The largest number of answers in a sequence."""
        return 1

    @abc.abstractmethod
    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""

    def _blank(self, n: int) -> Examples:
        return Examples(np.zeros((n, self.length), np.int32), np.full((n, self.length), IGNORED, np.int32))

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"{self}: {what}")


def subsets(scores: np.ndarray, size: int) -> np.ndarray:
    """Return the indices of the `size` smallest of every row [B, N], in no order: a random subset of random scores."""
    return np.argpartition(scores, size - 1)[:, :size]


def distinct(rng: np.random.Generator, n: int, size: int, *, below: int) -> np.ndarray:
    """Return `n` rows of `size` different integers from 0 to `below` - 1, in random order, int64 [B, size]."""
    if 2 * size > below:
        return rng.permuted(subsets(rng.random((n, below)), size), axis=1)
    # Only what is there twice is drawn anew, once. No integer is preferred, so all rows without repeats stay as likely.
    rows, again = rng.integers(below, size=(n, size)), np.arange(n)
    while len(again):
        ordered = np.sort(rows[again])
        again = again[(ordered[:, 1:] == ordered[:, :-1]).any(1)]
        order = np.argsort(rows[again], axis=1, kind="stable")
        ordered = np.take_along_axis(rows[again], order, 1)
        row, place = np.nonzero(ordered[:, 1:] == ordered[:, :-1])
        rows[again[row], order[row, place + 1]] = rng.integers(below, size=len(row))
    return rows
