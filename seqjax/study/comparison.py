"""The gaps of every model of a study to a reference, with intervals and their interpretation.

A gap belongs to the architectures only so far as it does not come from the training of the runs. Two other causes are
tested where a study has the runs: the learning rate and its schedule. A run at its end has a decayed rate, unlike a
longer run at the same loss.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqjax.study import protocol, statistics
from seqjax.study.protocol import Contrast, Record
from seqjax.study.records import Records
from seqjax.study.statistics import Estimate
from seqjax.utils import UserError

EQUAL, NATURAL = "mean, equal", "mean, natural"


class Gap(NamedTuple):
    """A gap of every quantity, by name, the in-domain losses between which it is taken, and the number of seeds."""

    low: float
    high: float
    seeds: int
    estimates: dict[str, Estimate]


@dataclasses.dataclass(frozen=True)
class Row:
    """The gaps of one model to one reference; None where they cannot be taken.

    `lowest` is at the lowest common in-domain loss, and `over_range` the average over the last 0.3 nats (0.1 bits per
    byte). `end_points` is against the line through the end points of the reference's schedules. `best_rate` is as
    `lowest` between the best learning rates of both, `rates` (this model's, the reference's); None for a model that ran
    at only one rate.
    """

    model: str
    lowest: Gap | None
    over_range: Gap | None
    end_points: Gap | None
    best_rate: Gap | None
    rates: tuple[float, float] | None


def models(records: Records) -> list[str]:
    """Return the models of the study in its order."""
    return list(dict.fromkeys(run.model for run in records.runs))


def require_model(records: Records, name: str) -> None:
    """Raise `UserError` unless the study has a model of that name."""
    known = models(records)
    if name not in known:
        raise UserError(f"The study has no model {name!r}. Its models: {'; '.join(known)}.")


def full_runs(records: Records, model: str) -> list[Record]:
    """Return the runs of a model with the full schedule, at every learning rate."""
    return [run for run in records.runs if run.model == model and run.schedule == 1]


def common_runs(records: Records, model: str) -> list[Record]:
    """Return the runs of a model with the full schedule at the common learning rate, one per seed."""
    return [run for run in full_runs(records, model) if run.rate == 1]


def quantities(records: Records) -> dict[str, np.ndarray]:
    """Return the quantities that have gaps: per name the weights [domains] of a mean over the study's domains."""
    n = len(records.domains)
    found = {domain: np.eye(n)[i] for i, domain in enumerate(records.domains)}
    if n > 1:
        found[EQUAL] = np.full(n, 1 / n)
        shares = protocol.natural_shares(records.runs, records.domains)
        if shares is not None:
            found[NATURAL] = shares
    return found


@functools.lru_cache(maxsize=4)  # the tables and every picture use the same rows
def compare(records: Records, reference: str) -> tuple[Row, ...]:
    """Return a row for every other model, sorted by the gap of the mean at the lowest common loss."""
    rows = [_row(records, model, reference) for model in models(records) if model != reference]
    main = main_quantity(records)
    return tuple(sorted(rows, key=lambda row: row.lowest.estimates[main].gap if row.lowest else np.inf))


def x_label(records: Records) -> str:
    """Return the name of the in-domain loss at which runs are compared."""
    return f"mean held-out loss of {', '.join(records.against)}" if records.against else "training loss"


def main_quantity(records: Records) -> str:
    """Return the name of the quantity by which models are sorted."""
    return records.domains[0] if len(records.domains) == 1 else EQUAL


def _row(records: Records, model: str, reference: str) -> Row:
    against = records.against
    both = protocol.pairs(common_runs(records, model), common_runs(records, reference))
    ours, theirs = full_runs(records, model), full_runs(records, reference)
    of_schedule = [run for run in records.runs if run.rate == 1]
    best, rates = None, None
    if len({run.rate for run in ours}) > 1:
        best_ours, best_theirs = protocol.best_rate(ours, against), protocol.best_rate(theirs, against)
        if best_ours and best_theirs:
            rates = best_ours[0].rate, best_theirs[0].rate
            best = protocol.gap_at_lowest(protocol.pairs(best_ours, best_theirs), against)
    lowest = protocol.gap_at_lowest(both, against)
    over_range = protocol.gap_over_range(both, against, width=records.unit.range)
    end_points = protocol.gap_to_end_points(common_runs(records, model), of_schedule, against, model=reference)
    return Row(
        model,
        lowest=evaluate(records, lowest) if lowest else None,
        over_range=evaluate(records, over_range) if over_range else None,
        end_points=evaluate(records, end_points) if end_points else None,
        best_rate=evaluate(records, best) if best else None,
        rates=rates,
    )


def by_rate(records: Records, model: str) -> dict[float, tuple[float, float]]:
    """Return the losses in and out of domain at the end of the full schedule, per learning rate, ascending.

    Both are means over seeds, and over domains that count the same.
    """
    runs = full_runs(records, model)
    rates = sorted({run.rate for run in runs})
    return {rate: _at_end(records, [run for run in runs if run.rate == rate]) for rate in rates}


def by_schedule(records: Records, model: str) -> dict[float, tuple[float, float]]:
    """Return the same per schedule, at the common learning rate."""
    runs = [run for run in records.runs if run.model == model and run.rate == 1]
    shares = sorted({run.schedule for run in runs})
    return {share: _at_end(records, [run for run in runs if run.schedule == share]) for share in shares}


def _at_end(records: Records, runs: Sequence[Record]) -> tuple[float, float]:
    outside = [[run.points[-1].domains[domain] for domain in records.domains] for run in runs]
    return float(np.mean([run.losses_in_domain(records.against)[-1] for run in runs])), float(np.mean(outside))


def evaluate(records: Records, contrast: Contrast) -> Gap:
    """Return the gap of a contrast for every quantity, with its interval."""
    gaps, slope = contrast.gaps(records.domains).mean(0), contrast.slope(records.domains)
    blocks = block_gaps(records, contrast, [*records.domains, *records.against])
    estimates = {}
    for name, weights in quantities(records).items():
        # The documents in domain are a sample, too: an error in the losses that are matched moves the gap by the slope.
        of_matching = [-float(weights @ slope) / len(records.against) for _ in records.against]
        width = np.inf if blocks is None else float(statistics.mean_half_width(blocks, [*weights, *of_matching]))
        estimates[name] = Estimate(float(gaps @ weights), width if np.isfinite(width) else None)
    return Gap(contrast.low, contrast.high, len(contrast.seeds), estimates)


def block_gaps(
    records: Records, contrast: Contrast, domains: Sequence[str]
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Return per domain the gap of every seed and block [seeds, blocks] and the documents; None if any is unknown."""
    if records.blocks is None:
        return None
    found = []
    for domain in domains:
        losses = records.blocks.losses[domain]
        gaps = np.zeros((len(contrast.seeds), losses.shape[1]))
        for of_seed, weighted in zip(gaps, contrast.seeds, strict=True):
            for run, weights in weighted:
                for i in np.flatnonzero(weights):
                    of_seed += weights[i] * losses[records.blocks.rows[run.label, run.points[i].step]]
        if np.isnan(gaps).any():
            return None
        found.append((gaps, records.blocks.documents[domain]))
    return found


def causes(row: Row) -> dict[str, Gap]:
    """Return the gaps that test causes other than the architecture for the gap at the lowest loss."""
    others = {"schedule": row.end_points, "learning rate": row.best_rate}
    return {cause: gap for cause, gap in others.items() if gap is not None}


def reading(row: Row, quantity: str) -> str:
    """Return in words whether a gap at the lowest common loss remains after its interval and tested other causes."""
    if row.lowest is None:
        return "-"
    gap = row.lowest.estimates[quantity]
    if not gap.differs:
        return "no interval" if gap.differs is None else "none"
    tested = {cause: other.estimates[quantity] for cause, other in causes(row).items()}
    closed = [c for c, other in tested.items() if other.differs is False or other.gap * gap.gap <= 0]
    if closed:
        return f"closed by the {' and the '.join(closed)}"
    if tested:
        return "stays"
    turns = row.over_range is not None and row.over_range.estimates[quantity].gap * gap.gap < 0
    return "not tested, changes sign" if turns else "not tested"


def ranking(records: Records, reference: str, rows: Sequence[Row]) -> list[list[str]]:
    """Return the models with several seeds by their gap to the reference, as groups that cannot be told apart."""
    main = main_quantity(records)
    gaps = {row.model: row.lowest.estimates[main].gap for row in rows if row.lowest and row.lowest.seeds > 1}
    if not gaps:
        return []
    gaps[reference] = 0.0
    order = sorted(gaps, key=gaps.__getitem__)
    differ = {}
    for i, one in enumerate(order):
        for other in order[:i]:
            both = protocol.pairs(common_runs(records, one), common_runs(records, other))
            contrast = protocol.gap_at_lowest(both, records.against)
            estimate = None if contrast is None else evaluate(records, contrast).estimates[main]
            differ[frozenset((one, other))] = estimate is not None and estimate.differs is True
    return statistics.groups(order, differ)
