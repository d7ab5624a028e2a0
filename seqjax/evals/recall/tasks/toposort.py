"""List a node's ancestors in topological order: a small version of Brevo.

Brevo is from "Physics of Language Models: Part 4.1" (arXiv 2512.17351). Brevo's graphs have up to 110 nodes of one or
several tokens, and its models generate the order. Here a node is one token, and the model predicts each next node given
a right order so far. Most graphs have several valid orders; every valid next node is right.
"""

import dataclasses
import functools

import numpy as np

from seqjax.evals.recall.tasks import IGNORED, Batch, Examples, Task, TaskSetup, distinct

PARENTS = 4  # maximum number of parents, and of children, per node


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopoSort(Task):
    """An acyclic graph's edges, a mark, a queried node and a topological order.

    The edges (parent, child) are in random order. The order lists the queried node's ancestors and then the node, each
    after its parents; its nodes are the answers. A graph has n nodes, from `shortest` to `longest`, with probability
    proportional to 1 / (n + sqrt(`longest`)). The first 1 to (n - 1) // 4 + 1 nodes have no parents; each later node
    has one to four earlier parents. The last node is queried.
    """

    order = 63
    question = "the ancestors of a node, parents first"
    is_recall = False

    shortest: int
    longest: int
    ids: int = 64

    def __post_init__(self):
        self._require(2 <= self.shortest <= self.longest <= self.ids, "needs 2 to `ids` nodes")
        self._require(self.length >= self._longest_row(self.longest), "needs a longer length for its edges and order")

    @staticmethod
    def _longest_row(nodes: int) -> int:
        """Return the maximum number of inputs for a graph with `nodes` nodes.

        They are the edges, the mark, the queried node and the order without its last node.
        """
        return 2 * sum(min(PARENTS, i) for i in range(nodes)) + 2 + nodes - 1

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""

        def of(shortest: int, longest: int) -> "TopoSort":
            return cls(length=cls._longest_row(longest), shortest=shortest, longest=longest)

        tests = {str(n): of(n, n) for n in (4, 10, 12, 16)}
        return {"small": TaskSetup(steps=4_000, train=(of(4, 10),), tests=tests, own="10", easy="4", depth=2)}

    @property
    def vocab_size(self) -> int:
        """Nodes and the mark."""
        return self.ids + 1

    @property
    def answers(self) -> int:
        """One per node in an order."""
        return self.longest

    @property
    def floor(self) -> float:
        """A random node of the graph that is not yet in the order."""
        return _guessed(self)

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        inputs, targets = self._blank(n)
        rows, N = np.arange(n), self.longest
        words = np.arange(self.shortest, N + 1)
        weights = 1 / (words + N**0.5)
        sizes = rng.choice(words, size=n, p=weights / weights.sum())
        roots = rng.integers(1, (sizes - 1) // 4 + 2)
        parents = np.zeros((n, N, N), bool)  # [sequence, node, parent]
        for node in range(1, N):
            open_to = parents[:, :, :node].sum(1) < PARENTS  # earlier nodes with fewer children
            scores = np.where(open_to, rng.random((n, node)), 1)
            count = np.where((node >= roots) & (node < sizes), rng.integers(1, PARENTS + 1, size=n), 0)
            parents[:, node, :node] = (scores.argsort(1).argsort(1) < count[:, None]) & open_to
        tokens = distinct(rng, n, N, below=self.ids)

        row, child, parent = np.nonzero(parents)
        order = np.lexsort((rng.random(len(row)), row))
        row, child, parent = row[order], child[order], parent[order]
        edges = np.bincount(row, minlength=n)
        at = 2 * (np.arange(len(row)) - np.repeat(np.cumsum(edges) - edges, edges))
        inputs[row, at], inputs[row, at + 1] = tokens[row, parent], tokens[row, child]

        at, last = 2 * edges + 1, sizes - 1
        inputs[rows, at - 1], inputs[rows, at] = self.ids, tokens[rows, last]
        needed, placed = _with_ancestors(parents, last), np.zeros((n, N), bool)
        for i in range(N):
            may_follow = _may_follow(parents, needed, placed)
            rows = np.nonzero(may_follow.any(1))[0]
            chosen = np.where(may_follow, rng.random((n, N)), -1).argmax(1)[rows]
            targets[rows, at[rows] + i] = tokens[rows, chosen]
            placed[rows, chosen] = True
            rows = rows[~placed[rows, last[rows]]]  # an order's last node is not an input
            inputs[rows, at[rows] + i + 1] = targets[rows, at[rows] + i]
        return Examples(inputs, targets)

    def right(self, batch: Batch, guesses: np.ndarray) -> np.ndarray:
        """Return whether each guessed id, [B, A], is a valid next node."""
        return np.take_along_axis(self.may_come(batch), guesses[..., None], 2)[..., 0]

    def may_come(self, batch: Batch) -> np.ndarray:
        """Return whether each id is a right answer, bool [B, A, ids + 1]."""
        n, ids = len(batch.inputs), self.vocab_size
        rows, at = np.arange(n), np.argmax(batch.inputs == self.ids, 1)  # `at`: position of the mark
        row, edge = np.nonzero(np.arange(batch.inputs.shape[1] // 2) < at[:, None] // 2)
        parents = np.zeros((n, ids, ids), bool)
        parents[row, batch.inputs[row, 2 * edge + 1], batch.inputs[row, 2 * edge]] = True
        needed, placed = _with_ancestors(parents, batch.inputs[rows, at + 1]), np.zeros((n, ids), bool)
        valid = np.zeros((*batch.targets.shape, ids), bool)
        for i, target in enumerate(batch.targets.T):
            valid[:, i] = _may_follow(parents, needed, placed)
            has_answer = target != IGNORED
            placed[rows[has_answer], target[has_answer]] = True
        return valid


def _with_ancestors(parents: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Return a mask [B, N] of each graph's node in `nodes` and its ancestors.

    `nodes` is [B], and `parents` is [B, node, parent].
    """
    needed = np.zeros(parents.shape[:2], bool)
    needed[np.arange(len(nodes)), nodes] = True
    while True:
        more = needed | np.einsum("bn,bnp->bp", needed, parents)
        if (more == needed).all():
            return needed
        needed = more


def _may_follow(parents: np.ndarray, needed: np.ndarray, placed: np.ndarray) -> np.ndarray:
    """Return a mask [B, N] of the valid next nodes.

    These are needed, not placed, and have no unplaced parent.
    """
    waits = np.einsum("bnp,bp->bn", parents, ~placed)
    return needed & ~placed & ~waits


@functools.cache
def _guessed(task: TopoSort) -> float:
    """Return the accuracy of guessing a random unplaced node.

    It is measured on sequences that are in no test.
    """
    inputs, targets = task.examples(np.random.default_rng(7), 2_000)
    edges = np.where(np.cumsum(inputs == task.ids, 1), -1, inputs)
    nodes = (np.diff(np.sort(edges, 1), axis=1) != 0).sum(1)  # distinct ids before the mark; -1 adds one
    positions = np.argmax(inputs == task.ids, 1)[:, None] + 1 + np.arange(task.answers)
    batch = Batch(inputs, positions, np.take_along_axis(targets, positions, 1))
    shares = task.may_come(batch).sum(2) / np.maximum(nodes[:, None] - np.arange(task.answers), 1)
    return float(shares[batch.targets != IGNORED].mean())
