"""The next token of a context-free grammar: Lano of "Physics of Language Models: Part 4.1" (arXiv 2512.17351), small.

Its grammars have layers: the rules of a level rewrite each of its three symbols as two or three of the next level's,
and those of the last level are the tokens. As there, all rules of a symbol are equally likely. Here there are four
levels of rules instead of six or seven. Most tokens cannot be known, so accuracy says little; the score is how far a
model is from the exact distribution, which a belief over the stacks of a parser gives. The rules come from seeds of
their own.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import scipy.sparse

from seqjax.evals.recall.tasks import IGNORED, Batch, Examples, Task, TaskSetup

SYMBOLS = 3  # of a level
IDS = SYMBOLS + 1  # the mark, and the symbols of the last level
FORCED = 1 - 1e-9  # the likelihood of a token from which on it is certain, but for rounding

Rules = tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]  # by level and symbol: what it may be rewritten as
Stack = tuple[tuple[int, int], ...]  # level and symbol of what is still to come, the next one at the end


@functools.cache
def rules_of(levels: int, fewest: int, most: int, seed: int) -> Rules:
    """Return the rules of a grammar: `fewest` to `most` of each symbol, of which the first level has one.

    All rules of a level differ, so that the children of a rule have one parent.
    """
    rng = np.random.default_rng(seed)
    every = [rule for n in (2, 3) for rule in itertools.product(range(SYMBOLS), repeat=n)]
    grammar = []
    for level in range(levels):
        counts = rng.integers(fewest, most + 1, size=SYMBOLS if level else 1)
        drawn = iter(rng.permutation(len(every)))
        grammar.append(tuple(tuple(every[next(drawn)] for _ in range(count)) for count in counts))
    return tuple(grammar)


class Automaton:
    """A grammar's strings, each after a mark, as a Markov chain of stacks; of each the next token is known.

    Attributes:
        tokens: The next token of every stack, int64 [S]: 0 is the mark, whose stack is the first.
        transitions: The likelihood of every stack after every other, sparse float64 [S, S].
    """

    def __init__(self, rules: Rules):
        self._rules = rules
        number: dict[Stack, int] = {(): 0}
        found: list[tuple[int, int, float]] = []
        stacks: list[Stack] = [()]
        for i, stack in enumerate(stacks):  # which grows
            for likelihood, after in self._rewritten(stack[:-1] if stack else ((0, 0),)):
                if after not in number:
                    number[after] = len(stacks)
                    stacks.append(after)
                found.append((i, number[after], likelihood))
        row, column, likelihood = zip(*found, strict=True)
        self.tokens = np.array([1 + stack[-1][1] if stack else 0 for stack in stacks])
        # The same stack after several rules is one, with the sum.
        self.transitions = scipy.sparse.coo_matrix((likelihood, (row, column)), shape=(len(stacks),) * 2).tocsr()

    def _rewritten(self, stack: Stack) -> list[tuple[float, Stack]]:
        """Return all stacks after rewriting the next symbol until it is a token, with their likelihoods."""
        if not stack or stack[-1][0] == len(self._rules):
            return [(1.0, stack)]
        *rest, (level, symbol) = stack
        rules = self._rules[level][symbol]
        stacks = [(*rest, *((level + 1, child) for child in reversed(rule))) for rule in rules]
        return [(p / len(rules), after) for stack in stacks for p, after in self._rewritten(stack)]

    def draw(self, rng: np.random.Generator, n: int, length: int) -> np.ndarray:
        """Draw `n` sequences of strings one after another, which begin with a mark, int64 [B, T]."""
        ends, place = np.cumsum(self.transitions.data), self.transitions.indptr
        stacks = np.zeros((n, length), np.int64)
        for t in range(1, length):
            now = stacks[:, t - 1]
            # The likelihoods of each stack's successors add up to one, so those of stack i end between i and i + 1.
            drawn = np.searchsorted(ends, now + rng.random(n), side="right")
            stacks[:, t] = self.transitions.indices[np.clip(drawn, place[now], place[now + 1] - 1)]
        return self.tokens[stacks]

    def next_token(self, tokens_BT: np.ndarray) -> np.ndarray:
        """Return the exact distribution of the token after each, given all so far, float64 [B, T, IDS].

        The first token is a mark. After a token that no string has, all likelihoods are 0.
        """
        n, length = tokens_BT.shape
        likelihoods = np.zeros((n, length, IDS))
        is_token: Any = scipy.sparse.csr_matrix(np.eye(IDS)[self.tokens])
        belief: Any = scipy.sparse.csr_matrix(
            (np.ones(n), (np.arange(n), np.zeros(n, np.int64))), (n, len(self.tokens))
        )
        for t in range(length):
            belief = belief @ self.transitions
            likelihoods[:, t] = (belief @ is_token).toarray()
            if t + 1 < length:
                row = np.repeat(np.arange(n), np.diff(belief.indptr))
                stays = self.tokens[belief.indices] == tokens_BT[row, t + 1]
                row, stack, weight = row[stays], belief.indices[stays], belief.data[stays]
                weight /= likelihoods[row, t, self.tokens[stack]]
                belief = scipy.sparse.csr_matrix((weight, (row, stack)), belief.shape)
        return likelihoods


@functools.cache
def automaton_of(levels: int, fewest: int, most: int, seed: int) -> Automaton:
    """Return the automaton of a grammar."""
    return Automaton(rules_of(levels, fewest, most, seed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar(Task):
    """Strings of a grammar one after another, each after a mark; the answer is the next token, everywhere.

    With `forced` only tokens are asked for that are certain, given all before. A grammar has `levels` of rules,
    `fewest` to `most` of a symbol, drawn from `seed`. Its ids begin with `first`, which is the mark. A second grammar
    in the same training needs ids of its own, mark included: after a common mark the first token would be uncertain.
    """

    order = 66
    question = "the next token of a grammar"
    is_recall = False
    score = "minus excess bits"

    fewest: int
    most: int
    seed: int
    levels: int = 4
    first: int = 0
    forced: bool = False

    def __post_init__(self):
        self._require(self.length >= 1 and self.levels >= 1, "needs tokens, and levels of rules")
        rules = SYMBOLS**2 + SYMBOLS**3
        self._require(1 <= self.fewest <= self.most and SYMBOLS * self.most <= rules, "needs rules that differ")

    @classmethod
    def sizes(cls) -> dict[str, TaskSetup]:
        """Return the training and the tests by size."""

        # Of the grammars of the first seeds, those with the entropies of Lano's cfg3b and cfg3f, last four levels: 0.6
        # bits a token with 40% of the tokens forced, and 1.05 bits with 12%.
        def two(length: int, *, forced: bool = False) -> "Grammar":
            return cls(length=length, fewest=2, most=2, seed=31, forced=forced)

        def four(length: int, *, forced: bool = False) -> "Grammar":
            return cls(length=length, fewest=3, most=4, seed=5, first=IDS, forced=forced)

        tests = {"2 rules, forced": two(128, forced=True), "2 rules": two(128), "3-4 rules": four(128)}
        tests |= {"3-4 rules, forced": four(128, forced=True), "3-4 rules, 512 tokens": four(512)}
        # Three levels, of which width 32 learns more than 5-grams know.
        demo = cls(length=64, fewest=2, most=2, seed=2, levels=3)
        forced, longer = (dataclasses.replace(demo, **change) for change in ({"forced": True}, {"length": 128}))
        return {
            "demo": TaskSetup(
                steps=800,
                train=(demo,),
                tests={"forced": forced, "64 tokens": demo, "128 tokens": longer},
                own="64 tokens",
            ),
            "small": TaskSetup(
                steps=4_000,
                train=(two(128), *[four(128)] * 3),
                tests=tests,
                own="3-4 rules",
                easy="2 rules, forced",
                depth=2,
                published="Guessing is by counts of 5-grams, whose score in the test like the training is -0.29.",
            ),
        }

    @property
    def vocab_size(self) -> int:
        """The ids up to the last of this grammar."""
        return self.first + IDS

    @property
    def answers(self) -> int:
        """One for each token."""
        return self.length

    @property
    def floor(self) -> float:
        """The most frequent token after the last four."""
        return by_5_grams(self)[0]

    @property
    def automaton(self) -> Automaton:
        """The grammar's."""
        return automaton_of(self.levels, self.fewest, self.most, self.seed)

    def examples(self, rng: np.random.Generator, n: int) -> Examples:
        """Draw `n` sequences."""
        tokens = self.automaton.draw(rng, n, self.length + 1)
        inputs, targets = ((self.first + part).astype(np.int32) for part in (tokens[:, :-1], tokens[:, 1:]))
        if self.forced:
            targets[self.automaton.next_token(tokens[:, :-1]).max(-1) < FORCED] = IGNORED
        return Examples(inputs, targets)

    def scores(self, batch: Batch, bits: np.ndarray, *, parameters: int) -> np.ndarray:
        """Return the bits of the answers by the exact distribution minus those of the model.

        The mean estimates minus the divergence of the model from the exact distribution. Both are of the same tokens,
        so that what is unlikely about these weighs on neither.
        """
        del parameters
        likelihoods = self.automaton.next_token(batch.inputs - self.first)
        asked = batch.targets != IGNORED
        row = np.nonzero(asked)[0]
        exact = np.zeros(bits.shape)
        exact[asked] = -np.log2(likelihoods[row, batch.positions[asked], batch.targets[asked] - self.first])
        return exact - bits


@functools.cache
def by_5_grams(task: Grammar, *, counted: int = 4096, asked: int = 1024) -> tuple[float, float]:
    """Return the share of right answers and the mean score of 5-gram counts, of so many sequences on so many others."""
    rng = np.random.default_rng(0)
    counts = np.full((IDS**4, IDS), 1e-2)  # of what was never seen too
    seen = dataclasses.replace(task, forced=False).examples(rng, counted)
    np.add.at(counts, (_before(seen.inputs - task.first), seen.targets - task.first), 1)
    inputs, targets = task.examples(rng, asked)
    places = np.broadcast_to(np.arange(task.length), targets.shape)
    row, place = np.nonzero(targets != IGNORED)
    of_context = counts[_before(inputs - task.first)[row, place]]
    answers = targets[row, place] - task.first
    bits = np.zeros(targets.shape)
    bits[row, place] = -np.log2(of_context[np.arange(len(row)), answers] / of_context.sum(1))
    scores = task.scores(Batch(inputs, places, targets), bits, parameters=0)[row, place]
    return float(np.mean(of_context.argmax(1) == answers)), float(scores.mean())


def _before(tokens_BT: np.ndarray) -> np.ndarray:
    """Return a number for every token and the three before it; before the first are marks."""
    wider = np.pad(tokens_BT, ((0, 0), (3, 0)))
    return np.lib.stride_tricks.sliding_window_view(wider, 4, axis=1) @ IDS ** np.arange(4)
