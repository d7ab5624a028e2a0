"""Decide verdicts on gaps, tested together per reference, and what an undecided gap needs.

    costs                  above zero (Holm over the models, two-sided, 5%), even if the gap is small
    gains                  below zero (the same family)
    "no cost above 0.05"   below 0.05 nats (Holm, one-sided, 2.5%), for remaining models with at least two seeds
    undecided              with the further seeds that it needs

A verdict must hold both at matched learning rates and as tuned. Each test therefore takes the gap that makes the
verdict harder: the gap nearer to zero for costs and gains, the larger gap for "no cost".
"""

from collections.abc import Sequence
from typing import NamedTuple

from seqjax.study.gaps import statistics
from seqjax.study.gaps.statistics import Part

LIMIT = 0.05  # nats: "no cost" needs evidence that the gap is smaller
TWO_SIDED, ONE_SIDED = 0.05, 0.025
POWER, MOST_SEEDS = 0.8, 9  # probability that the needed seeds decide; the most further seeds that are suggested
COSTS, GAINS, UNDECIDED = "costs", "gains", "undecided"


class Candidate(NamedTuple):
    """Hold a gap to be tested.

    Args:
        gap: The gap at matched learning rates.
        as_tuned: The gap as tuned.
        seeds: Single-seed variance: model, reference.
        counts: Seed counts: model, reference.
        rest: Variances that further seeds do not lower; the learning-rate part is first.
        planned: Single-seed variances to plan further seeds with. They differ from `seeds` only for a model with one
            seed: the test takes the widest variance of a model with three seeds, the plan the usual one.
    """

    gap: float
    as_tuned: float
    seeds: tuple[Part, Part]
    counts: tuple[int, int]
    rest: tuple[Part, ...]
    planned: tuple[Part, Part]

    @property
    def parts(self) -> list[Part]:
        """The gap's variance components."""
        return [Part(p.variance / n, p.freedom) for p, n in zip(self.seeds, self.counts, strict=True)] + [*self.rest]

    def p(self) -> float:
        """Return the two-sided p-value for a zero gap, at the less favourable gap."""
        total = statistics.combined(self.parts)
        return min(1.0, 2 * statistics.p_value(self._from_zero, total.variance**0.5, total.freedom))

    def p_above(self, limit: float) -> float:
        """Return the one-sided p-value for a gap of at least `limit`.

        The less favourable gap is tested.
        """
        total = statistics.combined(self.parts)
        return statistics.p_value(limit - max(self.gap, self.as_tuned), total.variance**0.5, total.freedom)

    @property
    def _from_zero(self) -> float:
        """The distance from zero to the nearer gap; negative if zero lies between them."""
        low, high = sorted((self.gap, self.as_tuned))
        return max(low, -high)

    def needs(self, *, level: float, limit: float) -> str:
        """Return the first plan with a power of 80% if the estimated gap is true.

        Plans: further seeds of the model; of the model and the reference; of both, with all their seeds at one learning
        rate, so that the variance between rates does not count.
        """
        distance = max(self._from_zero, limit - max(self.gap, self.as_tuned))
        for both_sides, rest, suffix in (
            (False, self.rest, ""),
            (True, self.rest, " of both"),
            (True, self.rest[1:], ONE),
        ):
            for n in range(1, MOST_SEEDS + 1):
                if self._is_decided(distance, n, n if both_sides else 0, rest, level):
                    return f"{n} more seed{'s' * (n > 1)}{suffix}"
        return f"more than {MOST_SEEDS} seeds of both"

    def _is_decided(
        self, distance: float, model_seeds: int, reference_seeds: int, rest: Sequence[Part], level: float
    ) -> bool:
        more = (model_seeds, reference_seeds)
        sides = [
            Part(part.variance / (count + n), part.freedom + n)
            for part, count, n in zip(self.planned if model_seeds else self.seeds, self.counts, more, strict=True)
        ]
        total = statistics.combined([*sides, *rest])
        return statistics.power(distance, total.variance**0.5, total.freedom, level=level) >= POWER


ONE = " of both at one rate"


class Verdict(NamedTuple):
    """Hold a verdict, its need if undecided, and the p-value for a zero gap."""

    word: str
    needs: str = ""
    p: float | None = None

    @property
    def text(self) -> str:
        """The verdict with its need: "undecided (needs: 2 more seeds)"."""
        return f"{self.word} (needs: {self.needs})" if self.needs else self.word


def no_cost(limit: float) -> str:
    """Return the verdict words for a gap below `limit`."""
    return f"no cost above {limit:.2g}"


def decide(gaps: Sequence[Candidate], several: Sequence[bool], *, limit: float) -> list[Verdict]:
    """Return the verdicts on gaps that are tested together.

    `several` marks models with at least two seeds. `limit` is `LIMIT` in the loss unit.
    """
    p_values = [tested.p() for tested in gaps]
    rejected = statistics.holm(p_values, level=TWO_SIDED)
    words = [
        (COSTS if tested.gap > 0 else GAINS) if is_rejected else ""
        for tested, is_rejected in zip(gaps, rejected, strict=True)
    ]
    remaining = [i for i, word in enumerate(words) if not word and several[i]]
    below = statistics.holm([gaps[i].p_above(limit) for i in remaining], level=ONE_SIDED)
    for i, is_below in zip(remaining, below, strict=True):
        words[i] = no_cost(limit) if is_below else ""
    n_open = sum(not word for word in words)
    return [
        Verdict(word or UNDECIDED, "" if word else tested.needs(level=ONE_SIDED / n_open, limit=limit), p)
        for word, tested, p in zip(words, gaps, p_values, strict=True)
    ]
