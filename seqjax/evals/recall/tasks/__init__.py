"""Define the recall tasks, one module per task, and the base class `Task`.

A task is a subclass of `Task` or of another task; its name is its file name. Every module in this package is imported
automatically, so a new file adds a task. Sequences of ids, with targets at some positions, are drawn during training. A
longer or harder test is the same frozen dataclass with other field values.
"""

import abc
import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

IGNORED = -1  # target at positions without an answer


class Examples(NamedTuple):
    """Inputs and targets, both int32 [B, T]; a target is the right id, or `IGNORED`."""

    inputs: np.ndarray
    targets: np.ndarray


class Batch(NamedTuple):
    """Sequences with up to A answers each.

    `inputs` is int32 [B, T]; `positions` and `targets` are int32 [B, A]. Targets of unused answer slots are `IGNORED`.
    """

    inputs: np.ndarray
    positions: np.ndarray
    targets: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """A distribution over sequences with `length` inputs and ids below `vocab_size`.

    Attributes:
        name: Module name; used in the command and in results.
        order: Sort key for training and report; ties are sorted by name.
        question: What the model must answer, for the report's heading.
        is_recall: Whether full attention can answer from the sequence. If so, its failure means failed training.
        score: Name of the mean of `scores`, for the report; "" if the task is judged by accuracy.
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
        """Return training and tests by size, `demo` or `small`.

        A size without an entry omits the task.
        """

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def answers(self) -> int:
        """Maximum number of answers per sequence."""
        return 1

    @property
    def floor(self) -> float:
        """The accuracy of the best guess without the tested skill; by default a random id."""
        return 1 / self.vocab_size

    @abc.abstractmethod
    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""

    def right(self, batch: Batch, guesses: np.ndarray) -> np.ndarray:
        """Return whether each guessed id in [B, A] is right, bool [B, A].

        Override it for tasks with several right answers. Values at `IGNORED` targets do not matter.
        """
        return guesses == batch.targets

    def scores(self, batch: Batch, bits: np.ndarray, *, parameters: int) -> np.ndarray:
        """Return a score per answer, [B, A]; higher is better.

        It is for tasks that are not judged by accuracy. `bits` [B, A] is the negative log2 likelihood of the right
        answers, and `parameters` the model's parameter count. Values at `IGNORED` targets do not matter.
        """
        raise NotImplementedError

    def _blank(self, n: int) -> Examples:
        return Examples(np.zeros((n, self.length), np.int32), np.full((n, self.length), IGNORED, np.int32))

    def _require(self, condition: bool, requirement: str) -> None:
        if not condition:
            raise ValueError(f"{self}: {requirement}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSetup:
    """A task at one size: training sequences, used in turn, and tests by name.

    Attributes:
        steps: Number of training steps.
        train: Training tasks; batches alternate between them.
        tests: Tests by name, the hardest last.
        own: The test that has the training distribution.
        easy: The easiest test within the training distribution; a model that fails it is reported as not trained.
        depth: Factor for the number of layers in the models' configs.
        published: A sentence about published results, for the report.
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
        """The task's class."""
        return type(self.train[0])

    @property
    def name(self) -> str:
        """The task's name."""
        return self.kind.name

    @property
    def vocab_size(self) -> int:
        """The largest vocabulary among training and tests."""
        return max(task.vocab_size for task in (*self.train, *self.tests.values()))

    @property
    def floor(self) -> float:
        """The accuracy of guessing in the test `own`."""
        return self.tests[self.own].floor


def kinds() -> list[type[Task]]:
    """Import all modules in this package and return their tasks, in report order."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    classes = Task.__subclasses__()
    classes += [derived for kind in classes for derived in kind.__subclasses__()]  # e.g. `noisy`, derived from `mqar`
    return sorted(classes, key=lambda kind: (kind.order, kind.name))


def of_size(size: str) -> tuple[TaskSetup, ...]:
    """Return the tasks that have this size, in report order."""
    return tuple(sizes[size] for kind in kinds() if size in (sizes := kind.sizes()))


def subsets(scores: np.ndarray, size: int) -> np.ndarray:
    """Return indices of the `size` smallest entries per row in [B, N], unordered.

    With random scores, each row is a random subset.
    """
    return np.argpartition(scores, size - 1)[:, :size]


def distinct(rng: np.random.Generator, n: int, size: int, *, below: int) -> np.ndarray:
    """Draw `n` rows of distinct integers below `below`, int64 [B, size].

    Each row is in random order.
    """
    if 2 * size > below:
        return rng.permuted(subsets(rng.random((n, below)), size), axis=1)
    # Redraw only the repeated integers. No integer is preferred, so all rows of distinct integers are equally likely.
    rows, redraw = rng.integers(below, size=(n, size)), np.arange(n)
    while len(redraw):
        ordered = np.sort(rows[redraw])
        redraw = redraw[(ordered[:, 1:] == ordered[:, :-1]).any(1)]
        order = np.argsort(rows[redraw], axis=1, kind="stable")
        ordered = np.take_along_axis(rows[redraw], order, 1)
        row, column = np.nonzero(ordered[:, 1:] == ordered[:, :-1])
        rows[redraw[row], order[row, column + 1]] = rng.integers(below, size=len(row))
    return rows
