"""Protocol 2: gaps at equal loss between trunks that are evaluated at their decayed ends, and their verdicts.

The gap of a model to a reference is taken at the loss in domain of the worse one's last end. The worse one is thus not
interpolated; the better one is, by a monotone cubic (Fritsch and Carlson, SIAM J. Numer. Anal. 17, 1980) through its
decayed ends, and never extrapolated. Documents are sampled as in protocol 1, by the linear weights of
`protocol.Contrast`; the difference between the cubic and the lines widens the interval.

The unit is a trunk. Each model's variance of seeds is drawn towards that of all models (`statistics.seed_parts`). One
gap per model and reference is the primary one, and these are tested together (`statistics.holm`). A verdict must hold
at every learning rate whose loss in domain is as good as the best. docs/protocol.md has the formulas, coverage and
power.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special
from scipy.interpolate import PchipInterpolator

from seqjax.study import comparison, protocol, statistics
from seqjax.study.protocol import NATS, Contrast, Record
from seqjax.study.records import Records
from seqjax.study.statistics import Estimate, Part

LIMIT = 0.05  # nats: a larger gap is called a cost
TOLERANCE = 0.02  # nats in domain: learning rates this close to the best are as good
SEEDS = 3  # fewer have no interval
MORE_SEEDS, SMALL = 5, 0.1  # gaps smaller than this, in nats, want this many seeds
ONE_SIDED = (1 - statistics.LEVEL) / 2
NUMBERS = {1: "one seed", 2: "two seeds"}


class Measured(NamedTuple):
    """A gap with its standard error and degrees of freedom, and the error of interpolation, in the unit of losses.

    `error` is None where fewer than three seeds or no losses of blocks leave it unknown.
    """

    gap: float
    error: float | None = None
    freedom: float = 1.0
    interpolation: float = 0.0

    @property
    def estimate(self) -> Estimate:
        """The gap with half the width of its own 95% interval, not corrected for other gaps."""
        if self.error is None:
            return Estimate(self.gap, None)
        t = float(special.stdtrit(self.freedom, (1 + statistics.LEVEL) / 2))
        return Estimate(self.gap, t * self.error + self.interpolation)

    def p_above(self, threshold: float, *, gap: float | None = None) -> float:
        """Return the one-sided p-value of the gap being at most `threshold`; `gap` is tested in its place."""
        return self._p((self.gap if gap is None else gap) - threshold)

    def p_below(self, threshold: float, *, gap: float | None = None) -> float:
        """Return the one-sided p-value of the gap being at least `threshold`."""
        return self._p(threshold - (self.gap if gap is None else gap))

    def _p(self, distance: float) -> float:
        assert self.error is not None, "only gaps with a standard error are tested"
        distance -= self.interpolation
        if self.error == 0:
            return float(distance <= 0)
        return float(special.stdtr(self.freedom, -distance / self.error))


class Rates(NamedTuple):
    """The learning rates of a model: per rate its number of seeds and its last losses in and out of domain.

    Losses are means over seeds; those out of domain are also unweighted means over domains. `best` is the rate with the
    lowest loss in domain, and `eligible` lists the rates as good. `primary` is the rate of the primary gap, and
    `outside` the eligible rate with the lowest loss out of domain. `edge` is "lowest" or "highest" if the best rate is
    at that edge of the grid, which should be extended, and "only" if there is one rate.
    """

    found: dict[float, tuple[int, float, float]]
    best: float
    eligible: tuple[float, ...]
    primary: float
    outside: float
    edge: str


class Matched(NamedTuple):
    """Runs paired by seed at equal loss: the linear contrast, the gaps by the cubic [seeds, domains], and the seeds."""

    contrast: Contrast
    gaps: np.ndarray
    seeds: tuple[int, ...]


class Verdict(NamedTuple):
    """The verdict of the primary gap, or the reason why there is none."""

    words: str
    why: str = ""


CANNOT_TELL = Verdict("cannot tell")


@dataclasses.dataclass(frozen=True)
class Row:
    """The comparison of a model with a reference.

    `rates` are those of the primary gap (the model's, the reference's), and `seeds` is the number of its pairs. `at`
    has the in-domain losses between which these are matched, and `gaps` the gap of every quantity; both are None
    without overlap. `over_rates` has the lowest and highest gap of the main quantity over all pairs of eligible rates;
    `n_apart` of the `n_pairs` have no overlap. `again` is the gap between `again_rates`, the eligible rates that are
    best out of domain. `outside` and `inside` are the gaps at equal tokens; None if the tokens differ.
    """

    model: str
    rates: tuple[float, float]
    seeds: int
    at: tuple[float, float] | None
    gaps: dict[str, Measured] | None
    over_rates: tuple[float, float] | None
    n_pairs: int
    n_apart: int
    again_rates: tuple[float, float]
    again: Measured | None
    outside: Measured | None
    inside: Measured | None
    verdict: Verdict = CANNOT_TELL


def runs_at(records: Records, model: str, rate: float) -> list[Record]:
    """Return the runs of a model at a learning rate, by seed."""
    found = [run for run in records.runs if run.model == model and run.rate == rate]
    return sorted(found, key=lambda run: run.seed)


def shown_runs(records: Records, model: str) -> list[Record]:
    """Return the runs that represent a model, one per seed: at the rate of its primary gap, or the common one.

    The latter is that of protocol 1; pictures and costs of both protocols are those of these runs.
    """
    if records.protocol == 1:
        return comparison.common_runs(records, model)
    return runs_at(records, model, rates(records, model).primary) if model in comparison.models(records) else []


def estimates(records: Records, reference: str) -> dict[str, Estimate]:
    """Return the main gap of every model that has one: the primary gap, or the gap at the lowest common loss."""
    main = comparison.main_quantity(records)
    if records.protocol == 1:
        rows = comparison.compare(records, reference)
        return {row.model: row.lowest.estimates[main] for row in rows if row.lowest is not None}
    return {row.model: row.gaps[main].estimate for row in compare(records, reference) if row.gaps is not None}


@functools.lru_cache(maxsize=128)
def rates(records: Records, model: str) -> Rates:
    """Return the losses of a model's learning rates, and which rates are eligible.

    A rate is eligible if its last in-domain loss is within 0.02 nats of the best, or within two standard errors of the
    best rate's mean over seeds if that is more. Rates are compared on the seeds that all of them have, if any: a
    seed moves the losses of all rates alike. The primary rate is the best, unless it has fewer than three seeds and
    another eligible rate has three: then the eligible rate with the most seeds.
    """
    of_rate = {
        rate: runs_at(records, model, rate) for rate in sorted({r.rate for r in records.runs if r.model == model})
    }
    common = set.intersection(*({run.seed for run in runs} for runs in of_rate.values()))
    found = {rate: (len(runs), *_mean_losses(records, runs)) for rate, runs in of_rate.items()}
    paired = {
        rate: _mean_losses(records, [run for run in runs if run.seed in common] or runs)
        for rate, runs in of_rate.items()
    }
    best = min(paired, key=lambda rate: paired[rate][0])
    error = np.sqrt(_variance_of_seeds(records) / (len(common) or found[best][0]))
    near = paired[best][0] + max(TOLERANCE * records.unit.range / NATS.range, 2 * error)
    eligible = tuple(rate for rate in found if paired[rate][0] <= near)
    most = max(eligible, key=lambda rate: (found[rate][0], -paired[rate][0]))
    primary = most if found[best][0] < SEEDS <= found[most][0] else best
    edge = "only" if len(found) == 1 else {min(found): "lowest", max(found): "highest"}.get(best, "")
    return Rates(found, best, eligible, primary, min(eligible, key=lambda rate: paired[rate][1]), edge)


def _mean_losses(records: Records, runs: Sequence[Record]) -> tuple[float, float]:
    """Return the means over runs of the last losses in domain and outside."""
    inside = np.mean([run.losses_in_domain(records.against)[-1] for run in runs])
    return float(inside), float(np.mean([run.losses(records.domains)[-1] for run in runs]))


@functools.lru_cache(maxsize=4)
def _variance_of_seeds(records: Records) -> float:
    """Return the variance of the last loss in domain between seeds, pooled over models and rates with several."""
    groups: dict[tuple[str, float], list[float]] = {}
    for run in records.runs:
        groups.setdefault((run.model, run.rate), []).append(float(run.losses_in_domain(records.against)[-1]))
    freedom = sum(len(group) - 1 for group in groups.values())
    return sum(float(np.var(group)) * len(group) for group in groups.values()) / freedom if freedom else 0.0


def interpolated(run: Record, against: Sequence[str], domains: Sequence[str], at: float | np.ndarray) -> np.ndarray:
    """Return the losses [..., domains] of a run at losses in domain `at` [...], by the cubic through its ends."""
    x, inverse, counts = np.unique(run.losses_in_domain(against), return_inverse=True, return_counts=True)
    y = np.zeros((len(x), len(domains)))
    np.add.at(y, inverse, run.losses(domains))  # ends at the same loss count as their mean, as in `weights_at`
    y /= counts[:, None]
    return y[0] + np.zeros((*np.shape(at), 1)) if len(x) == 1 else PchipInterpolator(x, y)(at)


def match(both: Sequence[tuple[Record, Record]], against: Sequence[str], domains: Sequence[str]) -> Matched | None:
    """Return the gap of each pair's first run to its second at the last in-domain loss of the worse run.

    None without a pair, or if the ends of a pair's better run do not reach up to that loss (no overlap).
    """
    seeds, slopes, gaps, at = [], [], [], []
    for pair in both:
        last = [float(run.losses_in_domain(against)[-1]) for run in pair]
        worse = int(last[1] > last[0])
        sign, loss, better = 1 - 2 * worse, last[worse], pair[1 - worse]
        x = better.losses_in_domain(against)
        weights = protocol.weights_at(x, loss)
        if weights is None:
            return None
        seeds.append([(pair[worse], sign * _at_last(pair[worse])), (better, -sign * weights)])
        slopes.append([(better, protocol.slope_weights(x, loss, loss))])
        gaps.append(sign * (pair[worse].losses(domains)[-1] - interpolated(better, against, domains, loss)))
        at.append(loss)
    if not at:
        return None
    return Matched(Contrast(min(at), max(at), seeds, slopes), np.array(gaps), tuple(run.seed for run, _ in both))


def match_rates(records: Records, one: tuple[str, float], other: tuple[str, float]) -> Matched | None:
    """Return `match` of two models at a rate each: runs with the same seed or, if no seed is common, all pairs."""
    runs, references = runs_at(records, *one), runs_at(records, *other)
    both = protocol.pairs(runs, references) or list(itertools.product(runs, references))
    return match(both, records.against, records.domains)


def _at_last(run: Record) -> np.ndarray:
    weights = np.zeros(len(run.points))
    weights[-1] = 1.0
    return weights


def compare(records: Records, reference: str) -> tuple[Row, ...]:
    """Return a row for every other model, sorted by the primary gap; models without one are last."""
    return _study(records)[reference]


@functools.lru_cache(maxsize=4)  # the tables and every picture use the same rows
def _study(records: Records) -> dict[str, tuple[Row, ...]]:
    """Return the rows to every reference.

    The primary gaps of the models to all references are one family of tests, those between references another: they are
    no question of the study, and must not widen the answers to what is.
    """
    main = comparison.main_quantity(records)
    known = comparison.models(records)
    found = {reference: _rows(records, reference) for reference in records.references if reference in known}
    every = [row for rows in found.values() for row in rows]
    groups = [
        [row for row in every if (row.model in records.references) is of_references] for of_references in (False, True)
    ]
    said = [iter(verdicts(rows, main, limit=limit(records))) for rows in groups]
    judged = {
        name: [dataclasses.replace(row, verdict=next(said[row.model in records.references])) for row in rows]
        for name, rows in found.items()
    }
    return {
        name: tuple(sorted(rows, key=lambda row: np.inf if row.gaps is None else row.gaps[main].gap))
        for name, rows in judged.items()
    }


def limit(records: Records) -> float:
    """Return the smallest gap that is called a cost, in the unit of the losses."""
    return LIMIT * records.unit.range / NATS.range


def _rows(records: Records, reference: str) -> list[Row]:
    models = [model for model in comparison.models(records) if model != reference]
    theirs = rates(records, reference)
    pairs = {
        model: protocol.pairs(
            runs_at(records, model, rates(records, model).primary), runs_at(records, reference, theirs.primary)
        )
        for model in models
    }
    matched = {model: match(both, records.against, records.domains) for model, both in pairs.items()}
    overlapping = {model: found for model, found in matched.items() if found is not None}
    main = comparison.main_quantity(records)
    measured: dict[str, dict[str, Measured]] = {model: {} for model in overlapping}
    for name, weights in comparison.quantities(records).items():
        cells = [dict(zip(found.seeds, found.gaps @ weights, strict=True)) for found in overlapping.values()]
        parts = statistics.seed_parts(cells)
        for (model, found), part in zip(overlapping.items(), parts, strict=True):
            measured[model][name] = _measured(records, found, weights, part)
    outside, inside = _at_equal_tokens(records, pairs)
    rows = []
    for model, both in pairs.items():
        ours = rates(records, model)
        readings = {
            (a, b): match_rates(records, (model, a), (reference, b)) for a in ours.eligible for b in theirs.eligible
        }
        weights = comparison.quantities(records)[main]
        known = {rate: float(found.gaps.mean(0) @ weights) for rate, found in readings.items() if found is not None}
        primary, again = (ours.primary, theirs.primary), (ours.outside, theirs.outside)
        found, found_again, reread = matched[model], readings[again], None
        if found is not None and again == primary:
            reread = measured[model][main]
        elif found_again is not None:
            reread = _measured(records, found_again, weights, _own(found_again.gaps @ weights))
        rows.append(
            Row(
                model,
                rates=primary,
                seeds=len(both),
                at=None if found is None else (found.contrast.low, found.contrast.high),
                gaps=None if found is None else measured[model],
                over_rates=(min(known.values()), max(known.values())) if known else None,
                n_pairs=len(readings),
                n_apart=len(readings) - len(known),
                again_rates=again,
                again=reread,
                outside=outside.get(model),
                inside=inside.get(model),
            )
        )
    return rows


def _own(gaps: np.ndarray) -> Part | None:
    return Part(float(np.var(gaps, ddof=1)) / len(gaps), len(gaps) - 1) if len(gaps) > 1 else None


def _measured(records: Records, found: Matched, weights: np.ndarray, part: Part | None) -> Measured:
    """Return the gap of a mean over domains, with the errors of documents, of the matched losses, and of seeds."""
    gap = float(found.gaps.mean(0) @ weights)
    bent = abs(gap - float(found.contrast.gaps(records.domains).mean(0) @ weights))
    # The documents in domain are a sample, too: an error in the losses that are matched moves the gap by the slope.
    slope = float(weights @ found.contrast.slope(records.domains))
    of_matching = dict.fromkeys(records.against, -slope / max(len(records.against), 1))
    of_domains = dict(zip(records.domains, weights, strict=True))
    return _with_error(records, gap, found.contrast, _added(of_domains, of_matching), part, interpolation=bent)


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: float(one.get(name, 0.0) + other.get(name, 0.0)) for name in dict.fromkeys([*one, *other])}


def _with_error(
    records: Records,
    gap: float,
    contrast: Contrast,
    weights: Mapping[str, float],
    part: Part | None,
    *,
    interpolation: float = 0.0,
) -> Measured:
    """Return a gap with the error of documents, by the weights of their domains, and of seeds, if there are three."""
    blocks = comparison.block_gaps(records, contrast, list(weights)) if len(contrast.seeds) >= SEEDS else None
    if blocks is None or part is None:
        return Measured(gap, interpolation=interpolation)
    variances, degrees = statistics.document_parts(blocks, list(weights.values()))
    parts = [Part(float(variance), n) for variance, n in zip(variances, degrees, strict=True)]
    total = statistics.combined([*parts, part])
    if not np.isfinite(total.variance):
        return Measured(gap, interpolation=interpolation)
    return Measured(gap, float(np.sqrt(total.variance)), total.freedom, interpolation)


def _at_equal_tokens(
    records: Records, pairs: Mapping[str, Sequence[tuple[Record, Record]]]
) -> tuple[dict[str, Measured], dict[str, Measured]]:
    """Return, per model, the difference of the last ends out of domain and in domain, where their tokens are equal."""
    equal = {
        model: both
        for model, both in pairs.items()
        if both and len({run.points[-1].tokens for pair in both for run in pair}) == 1
    }
    found: list[dict[str, Measured]] = []
    n = len(records.domains)
    for domains in (records.domains, records.against):
        of_model = []
        for both in equal.values():
            last = [
                [run.losses(domains)[-1].mean() if domains else run.points[-1].train_loss for run in pair]
                for pair in both
            ]
            of_model.append({pair[0].seed: float(a - b) for pair, (a, b) in zip(both, last, strict=True)})
        parts = statistics.seed_parts(of_model)
        measured = {}
        for (model, both), cells, part in zip(equal.items(), of_model, parts, strict=True):
            seeds = [[(a, _at_last(a)), (b, -_at_last(b))] for a, b in both]
            gap, weights = float(np.mean(list(cells.values()))), dict.fromkeys(domains, 1 / (len(domains) or n))
            # A training loss has no sampled documents, so its error is not known.
            part_of = part if domains else None
            measured[model] = _with_error(records, gap, Contrast(0.0, 0.0, seeds, []), weights, part_of)
        found.append(measured)
    return found[0], found[1]


def verdicts(rows: Sequence[Row], quantity: str, *, limit: float) -> list[Verdict]:
    """Return the verdicts of the primary gaps of all rows, tested together.

    Four families of one-sided tests at 2.5% are each corrected by Holm's procedure: the gap is above zero, above
    `limit`, below `limit`, below zero. The probability that any model without a gap is said to cost or to gain is thus
    at most 5%. The tests use the least favourable gap over the eligible learning rates, with the standard error of the
    primary gap.
    """
    tested = [i for i, row in enumerate(rows) if row.gaps is not None and row.gaps[quantity].error is not None]
    with_rates = _families([rows[i] for i in tested], quantity, limit=limit, over_rates=True)
    alone = _families([rows[i] for i in tested], quantity, limit=limit, over_rates=False)
    said = []
    for i, row in enumerate(rows):
        if i not in tested:
            said.append(CANNOT_TELL._replace(why=untested(row)))
            continue
        words = _words(with_rates[tested.index(i)], limit)
        if words:
            said.append(Verdict(words))
        elif _words(alone[tested.index(i)], limit):
            said.append(CANNOT_TELL._replace(why="learning rates"))
        else:
            assert row.gaps is not None
            estimate = row.gaps[quantity].estimate
            width = estimate.half_width or 0.0
            wide = abs(estimate.gap) <= width and estimate.gap + width >= limit
            said.append(CANNOT_TELL._replace(why="interval" if wide else "number of models"))
    return said


def untested(row: Row) -> str:
    """Return why a gap has no standard error and so is not tested."""
    if row.gaps is None:
        return "no overlap" if row.seeds else "no common seed"
    return NUMBERS.get(row.seeds, "no losses of blocks")


def _families(
    rows: Sequence[Row], quantity: str, *, limit: float, over_rates: bool
) -> list[tuple[bool, bool, bool, bool]]:
    """Return for each row whether its gap is above zero, above `limit`, below `limit`, and below zero."""
    families: list[list[float]] = [[], [], [], []]
    for row in rows:
        assert row.gaps is not None
        one = row.gaps[quantity]
        low, high = row.over_rates if over_rates and row.over_rates is not None else (one.gap, one.gap)
        p_values = (
            one.p_above(0.0, gap=low),
            one.p_above(limit, gap=low),
            one.p_below(limit, gap=high),
            one.p_below(0.0, gap=high),
        )
        for family, p in zip(families, p_values, strict=True):
            family.append(p)
    rejected = [statistics.holm(family, level=ONE_SIDED) for family in families]
    return [(a, b, c, d) for a, b, c, d in zip(*rejected, strict=True)]


def _words(found: tuple[bool, bool, bool, bool], limit: float) -> str:
    """Return the verdict, or "" if no test rejects."""
    costs, costs_more, not_more, gains = found
    if costs_more:
        return f"costs more than {limit:.2g}"
    if costs:
        return f"costs, but not more than {limit:.2g}" if not_more else "costs"
    if gains:
        return "gains"
    return f"does not cost more than {limit:.2g}" if not_more else ""
