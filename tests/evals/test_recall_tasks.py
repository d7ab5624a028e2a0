"""The recall tasks: the common contract, and targets that equal answers computed naively from the inputs."""

import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from seqjax.evals.recall.setups import MODELS, SETUPS
from seqjax.evals.recall.tasks import IGNORED, Batch, Task, TaskSetup, distinct, kinds
from seqjax.evals.recall.tasks.capacity import ATTRIBUTES, NAMES, VALUES, Capacity, table
from seqjax.evals.recall.tasks.copy import Copy
from seqjax.evals.recall.tasks.copy_selected import CopySelected
from seqjax.evals.recall.tasks.expressions import Expressions
from seqjax.evals.recall.tasks.fuzzy import Fuzzy
from seqjax.evals.recall.tasks.grammar import FORCED, Grammar, Rules, by_5_grams, rules_of
from seqjax.evals.recall.tasks.hops import Hops
from seqjax.evals.recall.tasks.induction import Induction
from seqjax.evals.recall.tasks.mqar import MQAR
from seqjax.evals.recall.tasks.ngram import Ngram
from seqjax.evals.recall.tasks.noisy import Noisy
from seqjax.evals.recall.tasks.position import Position
from seqjax.evals.recall.tasks.s5 import S5
from seqjax.evals.recall.tasks.toposort import TopoSort
from seqjax.evals.recall.tasks.where import Where
from seqjax.evals.recall.train import batch, batches, model_config, padded
from seqjax.models import Model
from tests import support

SIZED = {f"{kind.name}-{size}": setup for kind in kinds() for size, setup in kind.sizes().items()}


def test_every_module_is_a_task() -> None:
    files = (support.ROOT / "seqjax" / "evals" / "recall" / "tasks").glob("*.py")
    assert sorted(kind.name for kind in kinds()) == sorted({path.stem for path in files} - {"__init__"})
    assert all(kind.sizes() and kind.sizes().keys() <= SETUPS.keys() for kind in kinds())


@pytest.mark.parametrize("setup", SIZED.values(), ids=SIZED)
def test_task_contract(setup: TaskSetup) -> None:
    """Check shapes, ids and the number of answers; the seed determines the sequences."""
    assert setup.own in setup.tests and setup.easy in (*setup.tests, "")
    # The highest floors: 1/2 for a task with two answers (docs/recall.md), almost 2/3 for a grammar.
    assert 0 < setup.floor < 2 / 3 and setup.depth >= 1
    for task in {*setup.train, *setup.tests.values()}:
        assert type(task) is setup.kind and task.vocab_size <= setup.vocab_size
        (inputs, targets), same, other = (task.examples(np.random.default_rng(seed), 8) for seed in (1, 1, 2))
        assert inputs.shape == targets.shape == (8, task.length)
        assert inputs.dtype == targets.dtype == np.int32
        assert inputs.min() >= 0 and inputs.max() < task.vocab_size
        has_answer = targets != IGNORED
        assert targets[has_answer].min() >= 0 and targets.max() < task.vocab_size
        assert has_answer.any(1).all() and has_answer.sum(1).max() <= task.answers
        assert (inputs == same.inputs).all() and (targets == same.targets).all() and (inputs != other.inputs).any()
    inputs, positions, targets = next(batches(setup.train, batch_size=2, seed=0))
    assert inputs.shape == (2, max(task.length for task in setup.train))
    assert positions.shape == targets.shape == (2, max(task.answers for task in setup.train))


# Short sequences of each task, with answers that can be computed naively.
TASKS: list[Task] = [
    MQAR(length=64, pairs=8, ids=64),
    MQAR(length=16, pairs=4, ids=32),
    Noisy(length=64, pairs=8, ids=64),
    CopySelected(length=40, tokens=6),
    Induction(length=20),
    Ngram(length=40, ids=12),
    Ngram(length=30, ids=5, n=3),
    Ngram(length=30, queries=4),
    Ngram(length=12, ids=16, queries=3),
    Position(length=20, longest=32),
    Copy(length=30, shortest=2, longest=14),
    S5(length=12),
    S5(length=6, moved=5),
    Hops(length=40, shortest=5, longest=12, hops=(1, 2, 3), queries=5),
    Hops(length=30, shortest=6, longest=9, hops=(2, 3), queries=6, unchained=True, ids=12),
    Fuzzy(length=144, pairs=12, queries=12),
    Fuzzy(length=60, pairs=8, queries=2, tokens=1, ids=8),
    Expressions(length=60, shortest=1, longest=4),
    Expressions(length=70, shortest=0, longest=9, queries=3, numbers=23),
    Where(length=30, shortest=4, longest=20, queries=4),
    Where(length=17, shortest=8, longest=8),
    Grammar(length=40, fewest=2, most=2, seed=1, levels=3),
    Grammar(length=50, fewest=3, most=4, seed=2, levels=2, first=4),
    Grammar(length=60, fewest=2, most=2, seed=3, levels=3, first=2, forced=True),
    Grammar(length=30, fewest=1, most=3, seed=4, levels=1, forced=True),
    Capacity(length=64, people=40_000, among=40_000),
    Capacity(length=32, people=300, among=9),
    TopoSort(length=71, shortest=4, longest=10),
    TopoSort(length=40, shortest=2, longest=6, ids=7),
]


def answers(task: Task, row: list[int]) -> dict[int, int]:
    """Return the answers by position, computed naively from the inputs."""
    if isinstance(task, MQAR):
        context = 2 * task.pairs
        values = dict(zip(row[0:context:2], row[1:context:2], strict=True))
        return {i: values[row[i]] for i in range(context, task.length) if row[i] in values and (i - context) % 2 == 0}
    if isinstance(task, CopySelected):
        tokens = [token for token in row if token < task.ids]
        return dict(enumerate(tokens, start=task.length - task.tokens))
    if isinstance(task, Induction):
        return {task.length - 1: row[row.index(task.ids) + 1]}
    if isinstance(task, Ngram):
        end = row.index(task.ids)
        expected = {}
        for at in range(end + 1, task.length, task.n):
            starts = [i for i in range(end - task.n) if row[i : i + task.n] == row[at : at + task.n]]
            assert len(starts) == 1  # the answer is unique
            expected[at + task.n - 1] = row[starts[0] + task.n]
        return expected
    if isinstance(task, Position):
        return {task.length - 1: row[row[-1] - task.ids]}
    if isinstance(task, Copy):
        end = row.index(task.ids)
        assert row[:end] == row[end + 1 : 2 * end + 1] and set(row[2 * end + 1 :]) <= {task.ids + 1}
        return {end + i: token for i, token in enumerate(row[:end])}
    if isinstance(task, Hops):
        return hops(task, row)
    if isinstance(task, Fuzzy):
        return fuzzy(task, row)
    if isinstance(task, Expressions):
        return expressions(task, row)
    if isinstance(task, Where):
        end = row.index(task.ids)
        queries = range(end + 1, end + 1 + task.queries)
        return {i: task.ids + 1 + row[:end].index(row[i]) for i in queries}
    if isinstance(task, Grammar):
        return grammar(task, row)
    if isinstance(task, Capacity):
        return capacity(task, row)
    if isinstance(task, TopoSort):
        return toposort(task, row)
    permutations = list(itertools.permutations(range(5)))
    product, expected = list(range(5)), {}
    for i, number in enumerate(row):
        product = [permutations[number][place] for place in product]
        expected[i] = permutations.index(tuple(product))
    return expected


def hops(task: Hops, row: list[int]) -> dict[int, int]:
    """Return the answers to `hops` by following the edges one by one."""
    start = next(i for i, token in enumerate(row) if token >= task.ids)
    words, after = row[:start:2], dict(zip(row[0:start:2], row[1:start:2], strict=True))
    cycle = [words[0]]
    while after[cycle[-1]] != words[0]:
        cycle.append(after[cycle[-1]])
    assert sorted(cycle) == sorted(words) and task.shortest <= len(words) <= task.longest  # a single cycle
    queries = range(start + 1, start + 1 + 2 * task.queries, 2)
    assert len({row[i] for i in queries}) == task.queries and not any(row[start + 2 * task.queries :])
    expected = {}
    for i in queries:
        k, path = row[i - 1] - task.ids + 1, [row[i]]
        assert k in task.hops
        for _ in range(k):
            path.append(after[path[-1]])
        places = [words.index(word) for word in path[:-1]]
        if not task.unchained or places != sorted(places):
            expected[i] = path[-1]
    return expected


def pairs(task: Fuzzy, row: list[int]) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Return all (key, value, value start) of `fuzzy` in order: the pairs, then the queries."""
    runs = [(is_value, list(run)) for is_value, run in itertools.groupby(range(len(row)), lambda i: row[i] >= task.ids)]
    entries = []
    for (_, key), (_, value) in zip(runs[0::2], runs[1::2], strict=False):
        entries.append((tuple(row[i] for i in key), tuple(row[i] for i in value), value[0]))
    return entries


def fuzzy(task: Fuzzy, row: list[int]) -> dict[int, int]:
    """Return the answers to `fuzzy` from a table of all keys."""
    entries = pairs(task, row)
    definitions, queries = entries[: task.pairs], entries[task.pairs :]
    table = {key: value for key, value, _ in definitions}
    assert len(table) == task.pairs and len({key for key, _, _ in queries}) == len(queries) == task.queries
    assert {len(key) for key in table} <= {2, 3} and {len(value) for value in table.values()} <= {1, 2, 3}
    assert not [key for key in table if len(key) == 3 and key[:2] in table]  # no key is another key's prefix
    siblings = [key for key in table if any(key != other and key[:-1] == other[:-1] for other in table)]
    assert len(siblings) >= task.pairs // 2
    return {at - 1 + i: token for key, _, at in queries for i, token in enumerate(table[key][: task.tokens])}


def expressions(task: Expressions, row: list[int]) -> dict[int, int]:
    """Return the answers to `expressions` by recursion."""
    plus, minus, mark = range(task.numbers, task.numbers + 3)

    def value(tokens: Iterator[int]) -> tuple[int, int]:
        """Return the value and the number of operators of the next expression."""
        token = next(tokens)
        if token < task.numbers:
            return token, 0
        (left, n), (right, m) = value(tokens), value(tokens)
        return {plus: left + right, minus: left - right}[token], n + m + 1

    tokens, expected, at = iter(row), {}, 0
    for _ in range(task.queries):
        number, operators = value(tokens)
        assert next(tokens) == mark and task.shortest <= operators <= task.longest
        at += 2 * operators + 2
        expected[at - 1] = number % task.numbers
    assert set(tokens) <= {mark}
    return expected


@functools.cache
def strings(rules: Rules) -> dict[tuple[int, ...], float]:
    """Return the likelihood of each string of a grammar, with a final mark, from all derivations."""

    def of(level: int, symbol: int) -> list[tuple[tuple[int, ...], float]]:
        if level == len(rules):
            return [((1 + symbol,), 1.0)]
        derived = []
        for rule in rules[level][symbol]:
            for parts in itertools.product(*(of(level + 1, child) for child in rule)):
                string = tuple(token for part, _ in parts for token in part)
                derived.append((string, float(np.prod([p for _, p in parts])) / len(rules[level][symbol])))
        return derived

    total: dict[tuple[int, ...], float] = {}
    for string, likelihood in of(0, 0):
        total[(*string, 0)] = total.get((*string, 0), 0.0) + likelihood
    assert abs(sum(total.values()) - 1) < 1e-9
    return total


@functools.cache
def prefixes(rules: Rules) -> dict[tuple[int, ...], np.ndarray]:
    """Return the next-token likelihoods after each prefix of the grammar's strings."""
    likelihoods: dict[tuple[int, ...], np.ndarray] = {}
    for string, likelihood in strings(rules).items():
        for i, token in enumerate(string):
            likelihoods.setdefault(string[:i], np.zeros(4))[token] += likelihood
    return {prefix: p / p.sum() for prefix, p in likelihoods.items()}


def next_tokens(task: Grammar, row: list[int]) -> list[np.ndarray]:
    """Return the next-token likelihoods at each position, by counting strings."""
    rules, prefix, likelihoods = rules_of(task.levels, task.fewest, task.most, task.seed), (), []
    tokens = [token - task.first for token in row]
    assert tokens[0] == 0
    for token in tokens:
        prefix = (*prefix, token) if token else ()
        likelihoods.append(prefixes(rules)[prefix])
    return likelihoods


def grammar(task: Grammar, row: list[int]) -> dict[int, int]:
    """Return the answers to `grammar` except the last, which is not an input; with `forced`, all answers."""
    likelihoods = next_tokens(task, row)
    if task.forced:
        return {i: task.first + int(p.argmax()) for i, p in enumerate(likelihoods) if p.max() > FORCED}
    return dict(enumerate(row[1:]))


def capacity(task: Capacity, row: list[int]) -> dict[int, int]:
    """Return the answers to `capacity` from the table."""
    names, values = table(task.people)
    people = {(first, second): number for number, (first, second) in enumerate(names[: task.among].tolist())}
    assert len(people) == task.among  # names are distinct
    persons = [people[row[i], row[i + 1]] for i in range(0, task.length, 4)]
    assert len(set(persons)) == len(persons)  # a repeated fact could be looked up in the context
    attributes = [token - NAMES for token in row[2::4]]
    expected = [NAMES + ATTRIBUTES + int(values[person, a]) for person, a in zip(persons, attributes, strict=True)]
    assert row[3::4] == expected
    return dict(zip(range(2, task.length, 4), expected, strict=True))


def graph(task: TopoSort, row: list[int]) -> tuple[dict[int, set[int]], set[int], int]:
    """Return each node's parents, the queried node with its ancestors, and that node's position."""
    end = row.index(task.ids)
    parents: dict[int, set[int]] = {node: set() for node in row[:end]}
    for parent, child in zip(row[0:end:2], row[1:end:2], strict=True):
        parents[child].add(parent)

    def with_ancestors(node: int) -> set[int]:
        return {node}.union(*(with_ancestors(parent) for parent in parents[node]))

    return parents, with_ancestors(row[end + 1]), end + 1


def toposort(task: TopoSort, row: list[int]) -> dict[int, int]:
    """Return the answers to `toposort`: the order in the inputs, which ends with the queried node."""
    parents, ancestors, at = graph(task, row)
    edges = list(zip(row[0 : at - 1 : 2], row[1 : at - 1 : 2], strict=True))
    assert len(set(edges)) == len(edges) and all(len(nodes) <= 4 for nodes in parents.values())
    assert max(row[0 : at - 1 : 2].count(node) for node in parents) <= 4
    assert sum(not nodes for nodes in parents.values()) <= (task.longest - 1) // 4 + 1
    assert len(parents) <= task.longest and row[at] not in row[0 : at - 1 : 2]  # the queried node has no children
    order = [*row[at + 1 : at + len(ancestors)], row[at]]
    assert sorted(order) == sorted(ancestors) and not any(row[at + len(ancestors) :])
    assert all(order.index(parent) < order.index(node) for node in order for parent in parents[node])
    return dict(enumerate(order, start=at))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{type(task).__name__}-{task.length}")
def test_targets_equal_the_naive_answers(task) -> None:
    inputs, targets = task.examples(np.random.default_rng(0), 50)
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        expected = answers(task, row)
        scored = {i: t for i, t in enumerate(target) if t != IGNORED}
        if isinstance(task, MQAR):  # noise may be a key by chance
            assert len(scored) == task.pairs and scored.items() <= expected.items()
        elif isinstance(task, Grammar) and not task.forced:
            last = next_tokens(task, row)[-1]
            assert last[scored.pop(task.length - 1) - task.first] > 0 and scored == expected
        else:
            assert scored == expected


def first(inputs: np.ndarray, token: int) -> np.ndarray:
    """Return the position of the first `token` in each row."""
    return np.argmax(inputs == token, axis=1)


# A task, a drawn quantity of its inputs or targets, and all values of the quantity.
DRAWN = {
    "MQAR, keys": (MQAR(length=16, pairs=2, ids=16), lambda x, y: x[:, 0:4:2], range(1, 8)),
    "MQAR, values": (MQAR(length=16, pairs=2, ids=16), lambda x, y: x[:, 1:4:2], range(8, 16)),
    "MQAR, places": (MQAR(length=16, pairs=2, ids=16), lambda x, y: np.nonzero(y >= 0)[1], range(4, 16, 2)),
    "Noisy, places": (Noisy(length=16, pairs=2, ids=16), lambda x, y: np.nonzero(y >= 0)[1], range(4, 16, 2)),
    "CopySelected, places": (CopySelected(length=9, tokens=3, ids=4), lambda x, y: np.nonzero(x < 4)[1], range(6)),
    "CopySelected, ids": (CopySelected(length=9, tokens=3, ids=4), lambda x, y: y[:, 6:], range(4)),
    # the marker at the end is never the answer
    "Induction, places": (Induction(length=6, ids=4), lambda x, y: np.nonzero(x[:, :-1] == 4)[1], range(4)),
    "Induction, ids": (Induction(length=6, ids=4), lambda x, y: y[:, -1], range(4)),
    "Induction of 3": (Induction(length=3, ids=4), lambda x, y: np.nonzero(x[:, :-1] == 4)[1], range(1)),
    "Ngram, ids": (Ngram(length=9, ids=6), lambda x, y: x[:, :6], range(6)),
    "Position, places": (Position(length=5, ids=4, longest=8), lambda x, y: x[:, -1], range(4, 8)),
    "Position, ids": (Position(length=5, ids=4, longest=8), lambda x, y: y[:, -1], range(4)),
    "Copy, lengths": (Copy(length=9, shortest=2, longest=4, ids=3), lambda x, y: first(x, 3), range(2, 5)),
    "Copy, ids": (Copy(length=9, shortest=2, longest=4, ids=3), lambda x, y: y[y >= 0], range(3)),
    "Expressions, values": (Expressions(length=24, shortest=1, longest=5, queries=2), lambda x, y: y[y >= 0], range(7)),
    "Expressions, ids": (Expressions(length=24, shortest=1, longest=5, queries=2), lambda x, y: x, range(10)),
    "Expressions, lengths": (
        Expressions(length=14, shortest=0, longest=6, queries=1),
        lambda x, y: first(x, 9),
        range(1, 14, 2),
    ),
    # Position of the first number: 1 to 3 operators precede it.
    "Expressions, parts": (
        Expressions(length=8, shortest=3, longest=3, queries=1),
        lambda x, y: np.argmax(x < 7, 1),
        range(1, 4),
    ),
    "Fuzzy, key ids": (Fuzzy(length=18, pairs=2, queries=1, ids=4), lambda x, y: x[:, :2], range(4)),
    "Fuzzy, value ids": (Fuzzy(length=18, pairs=2, queries=1, ids=4), lambda x, y: y[y >= 0], range(4, 8)),
    "Fuzzy, answers": (Fuzzy(length=18, pairs=2, queries=1, ids=4), lambda x, y: (y >= 0).sum(1), range(1, 4)),
    "Fuzzy, key sizes": (Fuzzy(length=18, pairs=2, queries=1, ids=4), lambda x, y: np.argmax(x >= 4, 1), range(2, 4)),
    "Hops, words": (
        Hops(length=16, shortest=4, longest=5, hops=(1,), queries=3, ids=6),
        lambda x, y: y[y >= 0],
        range(6),
    ),
    "Hops, numbers": (Hops(length=16, shortest=5, longest=5, queries=3), lambda x, y: x[:, 10:16:2], range(64, 68)),
    "Hops, lengths": (Hops(length=64, shortest=8, longest=24), lambda x, y: np.argmax(x >= 64, 1), range(16, 49, 2)),
    "Grammar, ids": (Grammar(length=40, fewest=3, most=4, seed=5, first=4), lambda x, y: x, range(4, 8)),
    "Capacity, values": (Capacity(length=8, people=900, among=900), lambda x, y: y[y >= 0], range(260, 324)),
    "Capacity, attributes": (Capacity(length=8, people=9, among=9), lambda x, y: x[:, 2::4], range(256, 260)),
    "Capacity, people": (
        Capacity(length=8, people=9, among=3),
        lambda x, y: x[:, 0::4] * NAMES + x[:, 1::4],
        (table(9)[0][:3] @ [NAMES, 1]).tolist(),
    ),
    "TopoSort, nodes": (TopoSort(length=17, shortest=2, longest=4, ids=6), lambda x, y: y[y >= 0], range(6)),
    "TopoSort, answers": (TopoSort(length=17, shortest=2, longest=4), lambda x, y: (y >= 0).sum(1), range(2, 5)),
    "Where, lengths": (Where(length=9, shortest=3, longest=5, queries=1, ids=6), lambda x, y: first(x, 6), range(3, 6)),
    "Where, places": (Where(length=9, shortest=3, longest=5, queries=1, ids=6), lambda x, y: y[y >= 0], range(7, 12)),
}


@pytest.mark.parametrize("quantity", DRAWN)
def test_all_lengths_positions_and_ids_are_drawn(quantity) -> None:
    task, drawn, expected = DRAWN[quantity]
    assert set(drawn(*task.examples(np.random.default_rng(0), 300)).ravel().tolist()) == set(expected)


@functools.cache
def most_frequent(task: Grammar) -> dict[tuple[int, ...], int]:
    """Return the most frequent token after any four tokens, counted in sequences that are in no test."""
    counts: dict[tuple[int, ...], list[int]] = {}
    inputs, targets = task.examples(np.random.default_rng(7), 4_000)
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        padded = [task.first] * 3 + row
        for i, token in enumerate(target):
            counts.setdefault(tuple(padded[i : i + 4]), [0] * task.vocab_size)[token] += 1
    return {before: after.index(max(after)) for before, after in counts.items()}


def guesses(task: Task, row: list[int], at: list[int], rng: np.random.Generator) -> list[int]:
    """Return the guesses of a model without the tested skill."""
    if isinstance(task, Noisy):
        return rng.choice(row[1 : 2 * task.pairs : 2], size=len(at)).tolist()
    if isinstance(task, Capacity):
        return (NAMES + ATTRIBUTES + rng.integers(VALUES, size=len(at))).tolist()
    if isinstance(task, Grammar):
        after = most_frequent(dataclasses.replace(task, forced=False))
        padded = [task.first] * 3 + row
        return [after[tuple(padded[i : i + 4])] for i in at]
    if isinstance(task, Where):
        return (task.ids + 1 + rng.integers(row.index(task.ids), size=len(at))).tolist()
    if isinstance(task, Fuzzy):
        first_tokens = [value[0] for _, value, _ in pairs(task, row)[: task.pairs]]
        return [max(first_tokens, key=first_tokens.count)] * len(at)
    if isinstance(task, Expressions):
        return [row[i - 1] for i in at]  # the number before the mark
    if isinstance(task, Hops):
        words = row[: next(i for i, token in enumerate(row) if token >= task.ids) : 2]
        return [[word for word in words if word != row[i]][rng.integers(len(words) - 1)] for i in at]
    return rng.integers(task.vocab_size, size=len(at)).tolist()


@pytest.mark.parametrize(
    "task",
    [
        S5(length=4),
        Noisy(length=256, pairs=32),
        Where(length=73, shortest=8, longest=64),
        Where(length=25, shortest=16, longest=16),
        Hops(length=64, shortest=8, longest=24),
        Hops(length=32, shortest=8, longest=8, hops=(1,)),
        Expressions(length=60, shortest=1, longest=4),
        Fuzzy(length=144, pairs=12, queries=12, tokens=1),
        Fuzzy(length=288, pairs=24, queries=24, tokens=1),
        Grammar(length=64, fewest=3, most=4, seed=5),
        Grammar(length=64, fewest=2, most=2, seed=31, first=4, forced=True),
        Capacity(length=64, people=1_000, among=1_000),
    ],
    ids=lambda task: f"{type(task).__name__}-{task.length}",
)
def test_floor_is_the_accuracy_of_guessing(task) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = task.examples(rng, 2_000)
    right = []
    for row, target in zip(inputs.tolist(), targets, strict=True):
        at = np.nonzero(target != IGNORED)[0]
        right.append(np.mean(target[at] == guesses(task, row, at.tolist(), rng)))
    assert abs(np.mean(right) - task.floor) < 5 * np.std(right) / np.sqrt(len(right))


def batch_of(task: Task, n: int, *, length: int = 0) -> Batch:
    """Return `n` sequences as model inputs, padded to `length`."""
    return batch(padded(task.examples(np.random.default_rng(0), n), max(length, task.length)), task.answers)


@pytest.mark.parametrize("task", [task for task in TASKS if isinstance(task, Grammar)], ids=str)
def test_exact_grammar_distribution_has_no_excess_bits(task) -> None:
    """The exact likelihoods (from counted strings) score 0; a uniform guess scores minus its excess bits."""
    sequences = batch_of(task, 20)
    naive = np.stack([next_tokens(task, row) for row in sequences.inputs.tolist()])
    has_answer = sequences.targets != IGNORED
    row, place = np.nonzero(has_answer)
    likelihoods = naive[row, sequences.positions[row, place]]
    bits = np.zeros(sequences.targets.shape)
    bits[has_answer] = -np.log2(likelihoods[np.arange(len(row)), sequences.targets[has_answer] - task.first])
    assert bits.max() > 0.9 or task.forced
    np.testing.assert_allclose(task.scores(sequences, bits, parameters=1)[has_answer], 0, atol=1e-9)
    excess = 2 - bits  # a uniform guess over four ids has 2 bits per token
    uniform = task.scores(sequences, np.full(bits.shape, 2), parameters=1)
    np.testing.assert_allclose(uniform[has_answer], -excess[has_answer], atol=1e-9)
    longer = task.scores(batch_of(task, 20, length=task.length + 9), bits, parameters=1)
    np.testing.assert_allclose(longer[has_answer], 0, atol=1e-9)


@pytest.mark.parametrize(
    ("test", "bits", "forced", "best"), [("3-4 rules", 1.05, 0.12, 0.62), ("2 rules", 0.6, 0.4, 0.75)]
)
def test_grammars_have_lanos_entropy(test, bits, forced, best) -> None:
    """Entropy per token, fraction of certain tokens, and likelihood of the best guess.

    The expected values were measured on the last four levels in Lano's cfg3f and cfg3b (0.62 bits). Another grammar of
    the same form differs by a few percent.
    """
    task = Grammar.sizes()["small"].tests[test]
    assert isinstance(task, Grammar)
    inputs, targets = task.examples(np.random.default_rng(0), 256)
    likelihoods = task.automaton.next_token(inputs - task.first)
    np.testing.assert_allclose(likelihoods.sum(-1), 1, atol=1e-9)
    of_targets = np.take_along_axis(likelihoods, targets[..., None] - task.first, 2)
    entropies = -(likelihoods * np.log2(np.maximum(likelihoods, 1e-300))).sum(-1)
    assert abs(-np.log2(of_targets).mean() - entropies.mean()) < 0.01  # the likelihoods are calibrated
    statistics = (entropies.mean(), np.mean(likelihoods.max(-1) > FORCED), likelihoods.max(-1).mean())
    np.testing.assert_allclose(statistics, (bits, forced, best), atol=0.05)


def test_grammar_states_the_5_gram_score() -> None:
    setup = Grammar.sizes()["small"]
    own, easy = setup.tests[setup.own], setup.tests[setup.easy]
    assert isinstance(own, Grammar) and isinstance(easy, Grammar)
    assert f" is {by_5_grams(own)[1]:.2f}." in setup.published
    assert easy.floor < 0.75  # 5-gram counts do not pass the easiest test


def test_capacity_score_is_known_bits_per_parameter() -> None:
    task = Capacity(length=64, people=40_000, among=1_000)
    sequences = batch_of(task, 3)
    for bits, known in ((0, 6), (2, 4), (6, 0), (11, -5)):
        scores = task.scores(sequences, np.full(sequences.targets.shape, bits, np.float32), parameters=12_000)
        np.testing.assert_allclose(np.broadcast_to(scores, sequences.targets.shape), known * 4 * 1_000 / 12_000)


def test_half_of_two_hop_paths_follow_the_edge_order() -> None:
    """`unchained` queries the other half; a cycle of 24 words nearly always has eight such paths."""
    task = Hops(length=64, shortest=24, longest=24, hops=(2,))
    backwards = dataclasses.replace(task, unchained=True).examples(np.random.default_rng(0), 500).targets
    assert np.mean(backwards[:, 49::2] != IGNORED) > 0.9
    follows = []
    for row in task.examples(np.random.default_rng(0), 500).inputs.tolist():
        words, after = row[:48:2], dict(zip(row[0:48:2], row[1:48:2], strict=True))
        follows += [words.index(after[row[i]]) > words.index(row[i]) for i in range(49, 64, 2)]
    assert abs(np.mean(follows) - 0.5) < 5 * 0.5 / np.sqrt(len(follows))


def test_all_bigrams_of_a_string_are_queried() -> None:
    """A string of 6 tokens has four bigrams that are followed by a token."""
    inputs, _ = Ngram(length=9, ids=6).examples(np.random.default_rng(0), 300)
    row, place = np.nonzero((inputs[:, 0:5] == inputs[:, [7]]) & (inputs[:, 1:6] == inputs[:, [8]]))
    assert row.tolist() == list(range(300)) and set(place.tolist()) == set(range(4))


@pytest.mark.parametrize(("size", "below"), [(3, 40), (8, 10), (6, 6)])
def test_distinct_integers_are_uniform(size, below) -> None:
    rows = distinct(np.random.default_rng(0), 6000, size, below=below)
    assert rows.shape == (6000, size)
    assert all(len(set(row)) == size for row in rows.tolist())
    for column in (rows[:, 0], rows[:, -1]):
        counts = np.bincount(column, minlength=below)
        assert len(counts) == below and np.allclose(counts, 6000 / below, atol=5 * np.sqrt(6000 / below))


def test_swaps_move_two_items_and_reach_all_permutations() -> None:
    permutations = list(itertools.permutations(range(5)))
    inputs, targets = S5(length=40).examples(np.random.default_rng(0), 200)
    swaps = {permutations[number] for number in np.unique(inputs)}
    assert len(swaps) == 11 and {sum(i != p for i, p in enumerate(permutation)) for permutation in swaps} == {0, 2}
    assert len(np.unique(targets)) == 120
    arbitrary, _ = S5(length=9, moved=5).examples(np.random.default_rng(0), 200)
    assert len(np.unique(arbitrary)) == 120


def test_mqar_queries_come_early() -> None:
    task = MQAR(length=256, pairs=16)
    targets = task.examples(np.random.default_rng(0), 200).targets
    at = np.nonzero(targets != IGNORED)[1]
    assert np.mean(at < 128) > 0.6  # gaps follow a power law, so most queries are in the first half


def test_noisy_queries_come_anywhere() -> None:
    """At most one gap in six is within a window of 32 tokens."""
    task = Noisy(length=256, pairs=32)
    inputs, targets = task.examples(np.random.default_rng(0), 200)
    row, at = np.nonzero(targets != IGNORED)
    counts = np.bincount(at[at >= 64] // 2 - 32, minlength=96)
    assert np.allclose(counts, counts.mean(), atol=5 * np.sqrt(counts.mean())) and len(counts) == 96
    keys = np.argmax(inputs[row, 0:64:2] == inputs[row, at, None], axis=1)
    assert np.mean(at - 2 * keys < 32) < 1 / 6


def test_mqar_queries_the_first_pair_before_the_last() -> None:
    inputs, targets = MQAR(length=256, pairs=16).examples(np.random.default_rng(0), 500)
    # A pair's value is at an odd position in the context, and is the target at its query.
    first, last = (np.nonzero(targets == inputs[:, [place]])[1].mean() for place in (1, 31))
    assert first < last - 10


def test_batch_gathers_the_targets() -> None:
    task = MQAR(length=64, pairs=8, ids=64)
    examples = task.examples(np.random.default_rng(0), 20)
    inputs, positions, targets = batch(examples, 10)
    assert (inputs == examples.inputs).all() and positions.shape == targets.shape == (20, 10)
    assert (np.take_along_axis(examples.targets, positions, 1) == targets)[:, :8].all()
    assert (targets[:, :8] != IGNORED).all() and (targets[:, 8:] == IGNORED).all()
    assert (np.diff(positions[:, :8]) > 0).all()


def test_batches_repeat_by_seed_and_tests_are_not_trained_on() -> None:
    task = Induction(length=20)
    train, same, test = (next(batches([task], batch_size=64, seed=seed)).inputs for seed in (0, 0, 1))
    assert (train == same).all()
    assert not {tuple(row) for row in train.tolist()} & {tuple(row) for row in test.tolist()}


def test_batches_alternate_tasks_and_are_padded() -> None:
    stream = batches([S5(length=4), S5(length=6)], batch_size=3, seed=0)
    for length in (4, 6, 4):
        inputs, positions, targets = next(stream)
        assert inputs.shape == positions.shape == targets.shape == (3, 6)
        assert ((targets != IGNORED).sum(1) == length).all()
    examples = S5(length=4).examples(np.random.default_rng(0), 2)
    assert (padded(examples, 6).targets[:, 4:] == IGNORED).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: MQAR(length=15, pairs=4),
        lambda: MQAR(length=64, pairs=16, ids=32),
        lambda: CopySelected(length=31),
        lambda: Induction(length=2),
        lambda: Ngram(length=1000),
        lambda: Ngram(length=4),
        lambda: Ngram(length=12, queries=4),
        lambda: Ngram(length=12, queries=0),
        lambda: S5(length=4, moved=1),
        lambda: Position(length=300),
        lambda: Expressions(length=59, shortest=1, longest=4),
        lambda: Expressions(length=60, shortest=5, longest=4),
        lambda: Fuzzy(length=143, pairs=12, queries=12),
        lambda: Fuzzy(length=400, pairs=33, queries=1),
        lambda: Fuzzy(length=144, pairs=4, queries=5),
        lambda: Fuzzy(length=144, pairs=4, queries=4, tokens=4),
        lambda: Hops(length=64, shortest=8, longest=25),
        lambda: Hops(length=64, shortest=7, longest=24),
        lambda: Hops(length=64, shortest=8, longest=24, hops=(5,)),
        lambda: Hops(length=64, shortest=4, longest=24, hops=(4,), queries=4),
        lambda: Hops(length=64, shortest=8, longest=24, unchained=True),
        lambda: Grammar(length=0, fewest=2, most=2, seed=0),
        lambda: Grammar(length=9, fewest=3, most=2, seed=0),
        lambda: Grammar(length=9, fewest=2, most=13, seed=0),
        lambda: Capacity(length=63, people=100, among=100),
        lambda: Capacity(length=64, people=100, among=15),
        lambda: Capacity(length=64, people=100, among=101),
        lambda: Capacity(length=64, people=NAMES**2 + 1, among=16),
        lambda: Copy(length=20, shortest=2, longest=10),
        lambda: Copy(length=20, shortest=0, longest=5),
    ],
)
def test_impossible_sizes_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"^\w+\(length=\d+, .*\): needs "):
        make()


DIMS = sorted({dim for setup in SETUPS.values() for dim, _ in setup.rounds})


@pytest.mark.parametrize(
    ("label", "dim"),
    support.slow_unless(lambda label, dim: dim == DIMS[0] and " 1 in " not in label, itertools.product(MODELS, DIMS)),
)
def test_models_have_the_requested_width_and_vocabulary(label, dim) -> None:
    config = model_config(MODELS[label], dim=dim, vocab_size=50)
    assert (config.dim, config.vocab_size) == (dim, 50)
    assert config.n_layers in (2, 4, 5, 8)
    deeper = model_config(MODELS[label], dim=dim, vocab_size=50, depth=2)
    assert deeper.n_layers == 2 * config.n_layers
    model = Model(config, max_len=64)
    assert model.abstract_blocks()  # the mixers accept their settings at this width
    if dim == DIMS[0]:  # the layer pattern does not depend on the width
        assert Model(deeper, max_len=64).repeats == 2 * model.repeats


def test_derived_sizes_scale_with_the_width() -> None:
    def model(label: str, dim: int) -> Any:
        return model_config(MODELS[label], dim=dim, vocab_size=50)

    assert [model(label, 128).mlp.dim for label in ("Transformer", "RWKV-7", "Based", "DeltaNet")] == [
        512,
        512,
        256,
        None,
    ]
    assert [model("Gated DeltaProduct", dim).mixer.value_dim for dim in (64, 128)] == [40, 80]
    assert [getattr(mixer, "heads", None) for mixer in model("Based", 128).mixer] == [None, 4, 4, None, None]
    hybrid = model("Gated DeltaNet, Top-1 Chunk 1 in 4", 128)
    assert [(mixer.name, mixer.heads) for mixer in hybrid.mixer] == [("gated_deltanet", 4)] * 3 + [("top1_chunk", 4)]
    assert (hybrid.mlp.kind, hybrid.norm_eps) == ("swiglu", 1e-6)  # Gated DeltaNet's block
    assert model("W=256, QK norm", 128).mixer.window == 256


def test_docs_list_the_tasks_with_the_papers_of_their_modules() -> None:
    page = (support.ROOT / "docs" / "recall.md").read_text(encoding="utf-8")
    table = page.split("| task | answer | source |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| .+ \| (.*)\|$", table, re.M))
    assert len(rows) == len(table.splitlines())
    listed = [kind for kind in kinds() if kind.name in rows]  # a user's own task needs no row
    assert list(rows) == [kind.name for kind in listed] and len(rows) >= 8
    for kind in listed:
        module = sys.modules[kind.__module__].__doc__ or ""
        papers = re.findall(r"arXiv (\d+\.\d+)", rows[kind.name])
        assert papers == re.findall(r"arXiv (\d+\.\d+)", module)[: len(papers) or None], kind.name


@pytest.mark.parametrize("task", [task for task in TASKS if isinstance(task, TopoSort)], ids=str)
def test_valid_next_nodes_continue_a_topological_order(task) -> None:
    """The valid next nodes equal those of all permutations with parents first that start with the same nodes."""
    sequences = batch_of(task, 20, length=task.length + 3)
    may_come = task.may_come(sequences)
    several = 0
    for row, targets, valid in zip(sequences.inputs.tolist(), sequences.targets.tolist(), may_come, strict=True):
        parents, ancestors, _ = graph(task, row)
        if len(ancestors) > 7:
            continue
        orders = [
            order
            for order in itertools.permutations(ancestors)
            if all(order.index(parent) < order.index(node) for node in order for parent in parents[node])
        ]
        for i in range(len(ancestors)):
            expected = {order[i] for order in orders if list(order[:i]) == targets[:i]}
            assert set(np.nonzero(valid[i])[0].tolist()) == expected
            several += len(expected) > 1
    assert several > 5
    every = np.broadcast_to(np.arange(task.vocab_size), (*sequences.targets.shape, task.vocab_size))
    right = np.stack([task.right(sequences, every[..., i]) for i in range(task.vocab_size)], 2)
    assert (right == may_come).all()


@pytest.mark.parametrize("nodes", [4, 10])
def test_toposort_floor_is_the_accuracy_of_a_random_unplaced_node(nodes) -> None:
    task, rng = TopoSort(length=80, shortest=nodes, longest=nodes), np.random.default_rng(0)
    sequences = batch_of(task, 1_000)
    guessed = np.zeros_like(sequences.targets)
    for row, targets, guess in zip(sequences.inputs.tolist(), sequences.targets.tolist(), guessed, strict=True):
        nodes_of = graph(task, row)[0]
        for i in range(sum(target != IGNORED for target in targets)):
            guess[i] = rng.choice([node for node in nodes_of if node not in targets[:i]])
    right = task.right(sequences, guessed)[sequences.targets != IGNORED]
    assert abs(right.mean() - task.floor) < 5 * right.std() / np.sqrt(len(right))


@pytest.mark.parametrize("confidence", [0.0, 0.1, 1.0, 5.0, 30.0])
def test_capacity_does_not_reward_noise(confidence):
    """Random logits score about 0 at any confidence; perfect answers score 6 bits per fact."""
    task = Capacity(length=64, people=500, among=500)
    rng = np.random.default_rng(0)
    inputs, targets = task.examples(rng, 200)
    rows, places = np.nonzero(targets != IGNORED)
    sequences = Batch(inputs, places.reshape(200, -1), targets[rows, places].reshape(200, -1))
    logits = confidence * rng.standard_normal((200, task.answers, VALUES))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    answers = sequences.targets - NAMES - ATTRIBUTES
    bits = -np.take_along_axis(log_p, answers[..., None], -1)[..., 0] / np.log(2)
    facts, parameters = ATTRIBUTES * 500, 1000
    assert task.scores(sequences, bits, parameters=parameters).mean() < (1e-6 if confidence == 0 else 0.02)
    assert task.scores(sequences, bits, parameters=parameters).mean() == pytest.approx(
        (np.log2(VALUES) - bits.mean()) * facts / parameters
    )
    exact = task.scores(sequences, np.zeros_like(bits), parameters=parameters)
    assert exact.mean() == pytest.approx(6 * facts / parameters)
