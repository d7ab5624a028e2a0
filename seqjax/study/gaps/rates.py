"""The learning rates of a model: which are near-best, which is the best, and which to try next.

A rate is near-best if its last in-domain loss is within `NEAR` nats of the model's best rate. Rates are compared on the
seeds that all of them have, because a seed moves all rates alike. Above the optimum the effect of the rate on the OOD
loss turns; the limit keeps such rates out.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from seqjax.study.runs.record import Record, Records, in_domain, losses

NEAR = 0.03  # nats in domain


class Rates(NamedTuple):
    """The learning rates of a model, as multiples of the common one.

    Args:
        found: Rate -> number of seeds, last in-domain loss, last OOD loss (means over seeds).
        best: The rate with the lowest last in-domain loss.
        near: The near-best rates, ascending.
        shown: The near-best rate with the most seeds, of these the lowest in domain.
        edge: "lowest", "highest" or "only", if the best rate is at that edge of the grid.
    """

    found: dict[float, tuple[int, float, float]]
    best: float
    near: tuple[float, ...]
    shown: float
    edge: str

    def next_rate(self, preferred: float | None = None) -> float | None:
        """Return the rate that settles whether the best one is at the edge; None if it is inside the grid.

        A model with a single rate gets the `preferred` one, that of its reference, if it differs; else the double.
        """
        if self.edge == "only" and preferred is not None and preferred != self.best:
            return preferred
        return {"lowest": self.best / 2, "highest": self.best * 2, "only": self.best * 2}.get(self.edge)


@functools.lru_cache(maxsize=256)
def rates(records: Records, model: str) -> Rates:
    """Return the learning rates of a model that has runs."""
    of_rate: dict[float, list[Record]] = {}
    for run in sorted(records.of_model(model), key=lambda run: run.rate):
        of_rate.setdefault(run.rate, []).append(run)
    common = set.intersection(*({run.seed for run in runs} for runs in of_rate.values()))
    found = {rate: (len(runs), *_means(records, runs)) for rate, runs in of_rate.items()}
    paired = {
        rate: _means(records, [run for run in runs if run.seed in common] or runs)[0] for rate, runs in of_rate.items()
    }
    best = min(paired, key=paired.__getitem__)
    near = tuple(rate for rate in found if paired[rate] <= paired[best] + NEAR * records.unit.scale)
    shown = max(near, key=lambda rate: (found[rate][0], -paired[rate]))
    edge = "only" if len(found) == 1 else {min(found): "lowest", max(found): "highest"}.get(best, "")
    return Rates(found, best, near, shown, edge)


def _means(records: Records, runs: Sequence[Record]) -> tuple[float, float]:
    """Return the mean last losses of runs, in domain and OOD."""
    last = [run.last for run in runs]
    return float(in_domain(last, records.against).mean()), float(losses(last, records.domains).mean())


def shown_runs(records: Records, model: str) -> list[Record]:
    """Return the runs that represent a model in pictures and costs, one per seed: those at its `shown` rate."""
    runs = records.of_model(model)
    shown = rates(records, model).shown if runs else None
    return sorted((run for run in runs if run.rate == shown), key=lambda run: run.seed)
