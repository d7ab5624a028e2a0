"""Find a model's near-best learning rates, its best rate, and the next rate to try.

A rate is near-best if its last in-domain loss is within `NEAR` nats of the model's best rate. Rates are compared on
their common seeds, because a seed shifts the loss at all rates alike. Above the optimum, the learning rate's effect on
the OOD loss reverses; the limit excludes such rates.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from seqjax.study.runs.record import Record, Records, in_domain, losses

NEAR = 0.03  # nats in domain


class Rates(NamedTuple):
    """Hold a model's learning rates, as multiples of the common rate.

    Args:
        by_rate: Rate -> number of seeds, last in-domain loss, last OOD loss (means over seeds).
        best: The rate with the lowest last in-domain loss.
        near: The near-best rates, ascending.
        shown: The near-best rate with the most seeds; ties go to the lowest in-domain loss.
        edge: "lowest" or "highest" if the best rate is at that grid edge, "only" for a single rate, else "".
    """

    by_rate: dict[float, tuple[int, float, float]]
    best: float
    near: tuple[float, ...]
    shown: float
    edge: str

    def next_rate(self, preferred: float | None = None) -> float | None:
        """Return the next rate to try if the best rate is at a grid edge, else None.

        A model with a single rate tries its reference's best rate (`preferred`) if it differs, else twice its rate.
        """
        if self.edge == "only" and preferred is not None and preferred != self.best:
            return preferred
        return {"lowest": self.best / 2, "highest": self.best * 2, "only": self.best * 2}.get(self.edge)


@functools.lru_cache(maxsize=256)
def rates(records: Records, model: str) -> Rates:
    """Return the learning rates of a model that has runs."""
    runs_by_rate: dict[float, list[Record]] = {}
    for run in sorted(records.of_model(model), key=lambda run: run.rate):
        runs_by_rate.setdefault(run.rate, []).append(run)
    common = set.intersection(*({run.seed for run in runs} for runs in runs_by_rate.values()))
    by_rate = {rate: (len(runs), *_means(records, runs)) for rate, runs in runs_by_rate.items()}
    paired = {
        rate: _means(records, [run for run in runs if run.seed in common] or runs)[0]
        for rate, runs in runs_by_rate.items()
    }
    best = min(paired, key=paired.__getitem__)
    near = tuple(rate for rate in by_rate if paired[rate] <= paired[best] + NEAR * records.unit.scale)
    shown = max(near, key=lambda rate: (by_rate[rate][0], -paired[rate]))
    edge = "only" if len(by_rate) == 1 else {min(by_rate): "lowest", max(by_rate): "highest"}.get(best, "")
    return Rates(by_rate, best, near, shown, edge)


def _means(records: Records, runs: Sequence[Record]) -> tuple[float, float]:
    """Return mean last losses, in domain and OOD."""
    last = [run.last for run in runs]
    return float(in_domain(last, records.against).mean()), float(losses(last, records.domains).mean())


def shown_runs(records: Records, model: str) -> list[Record]:
    """Return the runs at a model's `shown` rate, one per seed.

    Pictures and cost tables show these runs.
    """
    runs = records.of_model(model)
    shown = rates(records, model).shown if runs else None
    return sorted((run for run in runs if run.rate == shown), key=lambda run: run.seed)
