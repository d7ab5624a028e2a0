"""The recall tasks: a module in this package for each, with its sequences, its sizes and its place in the report.

A task is a subclass of `Task` or of a task, named as its file, and is found because the file is in this package: no
list names it. Sequences of ids with targets at some positions are drawn on the fly; a test that is longer or holds more
is the same frozen dataclass with other numbers.
"""

import abc
import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

IGNORED = -1  # a target at a position without a question


class Examples(NamedTuple):
    """Inputs and targets, both int32 [B, T]; a target is `IGNORED` or the right id at that position."""

    inputs: np.ndarray
    targets: np.ndarray


class Batch(NamedTuple):
    """Inputs int32 [B, T], and of every question its position and its target, both int32 [B, A].

    A sequence with fewer questions than A has `IGNORED` as the other targets.
    """

    inputs: np.ndarray
    positions: np.ndarray
    targets: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """Sequences of one kind: `length` inputs each, with ids below `vocab_size`.

    Attributes:
        name: The name of the module, which the command and the results use.
        order: The place among the tasks, in training and in the report; tasks with the same number are sorted by name.
        question: The question of the task, for the heading of the report.
        is_recall: Whether full attention can answer from the sequence, so that its failure is one of the training.
        score: The name of the mean of `scores`, for the report; "" if accuracy says all.
    """

    length: int

    name: ClassVar[str]
    order: ClassVar[int] = 100
    question: ClassVar[str]
    is_recall: ClassVar[bool] = True
    score: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__module__.rpartition(".")[2]

    @classmethod
    @abc.abstractmethod
    def sizes(cls) -> dict[str, "TaskSetup"]:
        """Return the training and the tests by size, `demo` or `small`; a size that is missing has no such task."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def answers(self) -> int:
        """The largest number of answers in a sequence."""
        return 1

    @property
    def floor(self) -> float:
        """The share of right answers of the best guess that does not do what the task asks for; by default any id."""
        return 1 / self.vocab_size

    @abc.abstractmethod
    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""

    def right(self, batch: Batch, guesses: np.ndarray) -> np.ndarray:
        """Return whether each guess, an id for every answer [B, A], is right; a task with several right ones overrides.

        Where nothing is asked any value will do.
        """
        return guesses == batch.targets

    def scores(self, batch: Batch, bits: np.ndarray, *, parameters: int) -> np.ndarray:
        """Return a score of every answer, [B, A], that is not accuracy; more is better.

        It may depend on the negative log2 likelihood of the right answers, `bits` [B, A], and on the number of
        `parameters` of the model. Where nothing is asked any number will do.
        """
        raise NotImplementedError

    def _blank(self, n: int) -> Examples:
        return Examples(np.zeros((n, self.length), np.int32), np.full((n, self.length), IGNORED, np.int32))

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(f"{self}: {what}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSetup:
    """A task at one size: training sequences, used in turn, and tests by name, of which `own` is like the training.

    `easy` is a test that is the easiest of the training: of a model that fails it, the report says that it is not
    trained. `depth` is how many times the layers of their configs the models have, and `published` is a sentence about
    published results, for the report.
    """

    steps: int
    train: tuple[Task, ...]
    tests: Mapping[str, Task]
    own: str
    easy: str = ""
    depth: int = 1
    published: str = ""

    @property
    def kind(self) -> type[Task]:
        """The task."""
        return type(self.train[0])

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.kind.name

    @property
    def vocab_size(self) -> int:
        """Ids that training and tests have together."""
        return max(task.vocab_size for task in (*self.train, *self.tests.values()))

    @property
    def floor(self) -> float:
        """The share of right answers that a guess has in the test `own`."""
        return self.tests[self.own].floor


def kinds() -> list[type[Task]]:
    """Return the tasks of all modules in this package, in the order of the report."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found = Task.__subclasses__()
    found += [derived for kind in found for derived in kind.__subclasses__()]  # such as `noisy`, from `mqar`
    return sorted(found, key=lambda kind: (kind.order, kind.name))


def of_size(size: str) -> tuple[TaskSetup, ...]:
    """Return the tasks that have a size, in the order of the report."""
    return tuple(sizes[size] for kind in kinds() if size in (sizes := kind.sizes()))


def subsets(scores: np.ndarray, size: int) -> np.ndarray:
    """Return the indices of the `size` smallest of every row [B, N], in no order: a random subset of random scores."""
    return np.argpartition(scores, size - 1)[:, :size]


def distinct(rng: np.random.Generator, n: int, size: int, *, below: int) -> np.ndarray:
    """Return `n` rows of `size` different integers from 0 to `below` - 1, in random order, int64 [B, size]."""
    if 2 * size > below:
        return rng.permuted(subsets(rng.random((n, below)), size), axis=1)
    # Only repeats are drawn again. No integer is preferred, so all rows without repeats stay equally likely.
    rows, again = rng.integers(below, size=(n, size)), np.arange(n)
    while len(again):
        ordered = np.sort(rows[again])
        again = again[(ordered[:, 1:] == ordered[:, :-1]).any(1)]
        order = np.argsort(rows[again], axis=1, kind="stable")
        ordered = np.take_along_axis(rows[again], order, 1)
        row, place = np.nonzero(ordered[:, 1:] == ordered[:, :-1])
        rows[again[row], order[row, place + 1]] = rng.integers(below, size=len(row))
    return rows
