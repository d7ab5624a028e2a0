"""Build one row per model: its gap to a reference, and its verdict.

`heights.py` measures the gaps. A gap g with S model seeds and S_R reference seeds has the variance

    V = s_m^2 / S + s_R^2 / S_R + Delta^2 tau^2 (1 / K + 1 / 2) + (k d)^2 + V_text

Delta is the distance of the two mean rates in octaves. tau is the standard deviation of the K models' slopes. d is the
distance past the reference's ends at which the runs were read. k is the standard deviation between seeds of the height
slope over the last two ends. V_text is the variance over text draws. s^2 is a seed variance, shrunk towards all models'
pooled variance but never below the model's sample variance. Intervals use Satterthwaite's degrees of freedom.

Only models with the reference's optimiser and schedule are measured. Other models have a row without a gap, and their
runs enter no slope, variance or family of tests.

A model with one seed has a gap without an interval. Only for its verdict, s_m^2 is the largest variance among models
with three seeds. With fewer than `ENOUGH` such models, the verdict stays undecided.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from seqjax.errors import UserError
from seqjax.study.gaps import classes, documents, heights, statistics, tokens, trend, verdicts
from seqjax.study.gaps.classes import ClassSums
from seqjax.study.gaps.heights import Ends, Gaps, ModelGap
from seqjax.study.gaps.rates import rates, shown_runs
from seqjax.study.gaps.statistics import Estimate, Part, Spread
from seqjax.study.gaps.tokens import Difference, SpeedUp
from seqjax.study.gaps.verdicts import Candidate, Verdict
from seqjax.study.runs import checks
from seqjax.study.runs.checks import Training
from seqjax.study.runs.record import Record, Records

ENOUGH, SEEDS = 5, 3  # a verdict on one seed needs 5 models with 3 seeds, which show how much seeds vary
PARTS = ("seeds", "reference", "rate", "beyond", "text")
WHY = {
    heights.NO_REACH: "no end lies within reach of the reference's in-domain losses",
    heights.NO_RATE: "fewer than three models have two near-best rates, and both sides share none",
}
OTHER_TRAINING = "it has another optimiser or schedule than the reference"
NEEDS_SAME_TRAINING = "the reference's optimiser and schedule"
NOT_REACHED = Verdict(verdicts.UNDECIDED, heights.NO_REACH)
ONE_END = "the reference has one end per run; give its runs ends from 50% (train.ends=(0.5,0.65,0.8,1.0))"


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold a model's comparison with a reference.

    Losses are in the study's unit. A positive gap is worse.

    Args:
        model, reference: Names.
        verdict: The verdict on the gap, with its need if undecided.
        why: Reason for a missing gap; "" if there is a gap.
        seeds, reference_seeds: Seed counts in the gap; without a gap, counts of the shown runs.
        parameters, reference_parameters: Parameter counts, if known.
        rates: The compared near-best rates, as multiples of the common rate.
        edge, reference_edge: Position of the best rate in its grid: "lowest", "highest", "only", or "" inside.
        next_rates: "model" or "reference" -> the rate to try next, if the best rate is at an edge.
        loss: Mean in-domain loss at which the runs were read.
        tokens: Training tokens per run.
        mid_rate, octaves: Midpoint (geometric) and distance of the two mean rates.
        beyond: Distance past the reference's ends at which the runs were read.
        gaps: Gap of each quantity (`Records.quantities`), at matched learning rates.
        as_tuned: The main gap with each side at its near-best rates.
        by_rate: Rate -> the main gap at this rate.
        parts: Variance components of the main gap, by their names in `PARTS`.
        per_doubling: Change in the main gap per token doubling.
        at_equal_tokens: Loss differences after equal tokens.
        copy: Share of the OOD difference at equal tokens from tokens that continue an earlier bigram.
        speed_up: Speed-up to equal OOD loss.
    """

    model: str
    reference: str
    seeds: int
    reference_seeds: int
    rates: tuple[float, ...]
    edge: str
    reference_edge: str
    next_rates: dict[str, float]
    parameters: int | None = None
    reference_parameters: int | None = None
    verdict: Verdict = NOT_REACHED
    why: str = ""
    loss: float | None = None
    tokens: int | None = None
    mid_rate: float | None = None
    octaves: float = 0.0
    beyond: float = 0.0
    gaps: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    as_tuned: float | None = None
    by_rate: dict[float, float] = dataclasses.field(default_factory=dict)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    per_doubling: Estimate | None = None
    at_equal_tokens: Difference | None = None
    copy: float | None = None
    speed_up: SpeedUp | None = None

    @property
    def gap(self) -> Estimate | None:
        """The main gap: the mean over OOD domains."""
        return next(iter(self.gaps.values()), None)

    @property
    def provisional(self) -> bool:
        """Whether either side's best rate is its only rate or at a grid edge."""
        return bool(self.edge or self.reference_edge)

    @property
    def trend(self) -> str:
        """Return "shrinks" or "grows" if the trend's 95% interval excludes zero, else ""."""
        if self.per_doubling is None or not self.per_doubling.differs or self.gap is None:
            return ""
        return "grows" if self.per_doubling.value * self.gap.value > 0 else "shrinks"

    @property
    def marks(self) -> str:
        """The verdict's marks: "shrinks" or "grows", "one seed", and * for provisional."""
        words = [mark for mark in (self.trend, "one seed" if self.gap and self.seeds == 1 else "") if mark]
        return "".join(f", {mark}" for mark in words) + ("*" if self.provisional else "")

    @property
    def text(self) -> str:
        """The verdict with marks and need: "undecided, one seed* (needs: 2 more seeds)"."""
        needs = f" (needs: {self.verdict.needs})" if self.verdict.needs else ""
        return f"{self.verdict.word}{self.marks}{needs}"

    @property
    def size(self) -> float | None:
        """The model's parameter count relative to the reference's; None if unknown."""
        if not self.parameters or not self.reference_parameters:
            return None
        return self.parameters / self.reference_parameters


def require_model(records: Records, name: str) -> None:
    """Raise `UserError` unless the study has runs with this model."""
    if name not in records.models:
        raise UserError(f"The study has no model {name!r}. Its models: {'; '.join(records.models)}.")


def compare(records: Records, reference: str) -> tuple[Row, ...]:
    """Return a row per model, lowest gap first and models without a gap last.

    Raises `UserError` if the study has no model named `reference`.
    """
    require_model(records, reference)
    return _compare(records, reference)


def estimates(records: Records, reference: str) -> dict[str, Estimate]:
    """Return the main gaps by model."""
    return {row.model: row.gap for row in compare(records, reference) if row.gap is not None}


def with_copies(rows: Sequence[Row], records: Records, sums: Mapping[str, ClassSums]) -> tuple[Row, ...]:
    """Return rows with copy shares.

    `sums` are class sums by run label (`classes.read`).
    """
    return tuple(dataclasses.replace(row, copy=_copy(row, records, sums)) for row in rows)


def _copy(row: Row, records: Records, sums: Mapping[str, ClassSums]) -> float | None:
    if row.at_equal_tokens is None or not sums:
        return None
    outside = row.at_equal_tokens.outside
    if outside.value <= verdicts.LIMIT * records.unit.scale or outside.value <= 2 * (outside.error or 0.0):
        return None
    sides = [
        [sums[r.label] for r in shown_runs(records, name) if r.label in sums] for name in (row.model, row.reference)
    ]
    return classes.copy_share(*sides, domains=records.domains) if all(sides) else None


@functools.lru_cache(maxsize=16)
def comparable(records: Records, reference: str) -> Records:
    """Return the study without models that have another optimiser or schedule than the reference."""
    trained: dict[str, Training] = {}
    for run in records.runs:
        own = checks.training(run.metadata.get("config", {}))
        trained[run.model] = trained.get(run.model, own).known(own)
    models = {model for model, how in trained.items() if how.fits(trained[reference])}
    if len(models) == len(trained):
        return records
    return dataclasses.replace(records, runs=[run for run in records.runs if run.model in models])


@functools.lru_cache(maxsize=16)  # tables and every picture use the same rows
def _compare(records: Records, reference: str) -> tuple[Row, ...]:
    same = comparable(records, reference)
    others = [
        dataclasses.replace(
            _plain(records, model, reference, None),
            next_rates={},
            why=OTHER_TRAINING,
            verdict=Verdict(verdicts.UNDECIDED, NEEDS_SAME_TRAINING),
        )
        for model in records.models
        if model not in same.models
    ]
    return (*_measured(same, reference), *others)


def _measured(records: Records, reference: str) -> tuple[Row, ...]:
    differences = tokens.equal_tokens(records, reference)
    others = [model for model in records.models if model != reference]
    plain = {model: _plain(records, model, reference, differences.get(model)) for model in others}
    if max(len(run.ends) for run in _near(records, reference)) < 2:
        return tuple(dataclasses.replace(row, why=ONE_END) for row in plain.values())
    measured, drawn = _measure(records, reference)
    trends = _trends(records, reference, measured)
    rows, tested = [], {}
    quantities = range(len(records.quantities))
    spreads = [_spread(measured, q) for q in quantities]
    bends, free = [_bend(records, measured, q) for q in quantities], documents.freedom(records)
    for model, row in plain.items():
        gap = measured.by_model[model]
        row = dataclasses.replace(row, per_doubling=trends.get(model))
        if isinstance(gap, str):
            rows.append(dataclasses.replace(row, why=WHY[gap], verdict=Verdict(verdicts.UNDECIDED, gap)))
            continue
        on_draws = drawn.by_model.get(model) if drawn is not None else None
        quantity_gaps = []
        for q in quantities:
            beyond = Part(bends[q].variance * float(gap.beyond[0]) ** 2, bends[q].freedom)
            text_variance = documents.variance(on_draws.mean[:, q]) if isinstance(on_draws, ModelGap) else 0.0
            quantity_gaps.append(
                _estimate(measured, gap, spreads[q], {"beyond": beyond, "text": Part(text_variance, free)}, q)
            )
        main = gap.mean[0, 0]
        if quantity_gaps[0][1] is not None:
            tested[model] = _tested(measured, gap, quantity_gaps[0][1], spreads[0])
        rows.append(
            dataclasses.replace(
                row,
                seeds=len(gap.by_seed),
                reference_seeds=len(gap.reference),
                rates=gap.rates[0],
                loss=float(gap.loss[0]),
                mid_rate=float(2 ** (sum(gap.rho) / 2)),
                octaves=gap.octaves,
                beyond=float(gap.beyond[0]),
                gaps={name: estimate for name, (estimate, _) in zip(records.quantities, quantity_gaps, strict=True)},
                as_tuned=float(main + measured.c[0, 0] * gap.octaves),
                by_rate={rate: float(value[0, 0]) for rate, value in gap.by_rate.items()},
                parts={} if quantity_gaps[0][1] is None else {n: p.variance for n, p in quantity_gaps[0][1].items()},
            )
        )
    rows = _with_verdicts(records, rows, tested)
    return tuple(sorted(rows, key=lambda row: np.inf if row.gap is None else row.gap.value))


def _near(records: Records, model: str) -> list[Record]:
    """Return a model's runs at its near-best rates."""
    near = rates(records, model).near
    return [run for run in records.of_model(model) if run.rate in near]


def _plain(records: Records, model: str, reference: str, difference: Difference | None) -> Row:
    """Return a model's row without its gap."""
    model_rates, reference_rates = rates(records, model), rates(records, reference)
    sides = [shown_runs(records, name) for name in (model, reference)]
    next_rates = {
        "model": model_rates.next_rate(reference_rates.best),
        "reference": reference_rates.next_rate(model_rates.best),
    }
    parameters = [side[0].metadata.get("parameters") for side in sides]
    return Row(
        model,
        reference,
        *(len(side) for side in sides),
        rates=model_rates.near,
        edge=model_rates.edge,
        reference_edge=reference_rates.edge,
        next_rates={side: rate for side, rate in next_rates.items() if rate is not None},
        parameters=parameters[0],
        reference_parameters=parameters[1],
        tokens=max(run.last.tokens for run in sides[0]),
        at_equal_tokens=difference,
        speed_up=tokens.speed_up(records, model, reference, difference),
    )


def _measure(records: Records, reference: str) -> tuple[Gaps, Gaps | None]:
    """Return the measured gaps, and the gaps on text draws if block losses are known."""
    best, reach = rates(records, reference).best, heights.REACH * records.unit.scale
    near = {model: _near(records, model) for model in records.models}
    data = {model: [documents.measured_ends(records, run) for run in runs] for model, runs in near.items()}
    measured = heights.measure(data, reference, best, reach=reach)
    drawn: dict[str, list[Ends]] = {}
    for model, runs in near.items():
        run_ends = [ends for run in runs if (ends := documents.drawn_ends(records, run)) is not None]
        if len(run_ends) == len(runs):
            drawn[model] = run_ends
    if reference not in drawn:
        return measured, None
    among = {model: gap.labels for model, gap in measured.by_model.items() if isinstance(gap, ModelGap)}
    return measured, heights.measure(drawn, reference, best, reach=reach, among=among)


def _trends(records: Records, reference: str, measured: Gaps) -> dict[str, Estimate]:
    data = {model: [documents.measured_ends(records, run) for run in _near(records, model)] for model in records.models}
    return trend.per_doubling(data, reference, measured.curve, reach=heights.REACH * records.unit.scale)


def _values(by_seed: Mapping[int, np.ndarray], quantity: int) -> list[float]:
    return [float(value[0, quantity]) for value in by_seed.values()]


def _model_gaps(measured: Gaps) -> list[ModelGap]:
    return [gap for gap in measured.by_model.values() if isinstance(gap, ModelGap)]


def _spread(measured: Gaps, quantity: int) -> Spread | None:
    """Return the pooled seed variance over all models and the reference."""
    gaps = _model_gaps(measured)
    if not gaps:
        return None
    reference = max((gap.reference for gap in gaps), key=len)
    return statistics.spread([_values(side, quantity) for side in (reference, *(gap.by_seed for gap in gaps))])


def _estimate(
    measured: Gaps, gap: ModelGap, spread: Spread | None, others: Mapping[str, Part], quantity: int
) -> tuple[Estimate, dict[str, Part] | None]:
    """Return a quantity's gap and its variance components, which include `others`.

    A model with one seed has no interval.
    """
    value = float(gap.mean[0, quantity])
    if spread is None:
        return Estimate(value), None
    sides = [(spread.shrunk(_values(side, quantity)), len(side)) for side in (gap.by_seed, gap.reference)]
    seeds, reference = (Part(part.variance / n, part.freedom) for part, n in sides)
    n_slopes = len(measured.slopes)
    tau = np.std([slope[0, quantity] for slope in measured.slopes.values()], ddof=1) if n_slopes > 1 else 0.0
    rate = gap.octaves**2 * float(tau) ** 2 * (1 / n_slopes + 0.5) if n_slopes else 0.0
    parts = {
        "seeds": seeds,
        "reference": reference,
        "rate": Part(rate, max(n_slopes - 1, 1)),
    } | dict(others)
    total = statistics.combined(list(parts.values()))
    if len(gap.by_seed) < 2:
        return Estimate(value), parts
    return Estimate(value, total.variance**0.5, total.freedom), parts


def _bend(records: Records, measured: Gaps, quantity: int) -> Part:
    """Return the variance between seeds of the height slope over the last two ends."""
    groups: dict[tuple[str, float], list[float]] = {}
    for run in records.runs:
        ends = documents.measured_ends(records, run)
        if ends.x.shape[1] > 1 and (width := ends.x[0, -1] - ends.x[0, -2]):
            u = (ends.y - measured.curve.at(ends.x))[0, :, quantity]
            groups.setdefault((run.model, run.rate), []).append(float((u[-1] - u[-2]) / width))
    freedom = sum(len(group) - 1 for group in groups.values())
    squares = sum(float(np.var(group)) * len(group) for group in groups.values())
    return Part(squares / freedom, freedom) if freedom else Part(0.0, 1.0)


def _tested(measured: Gaps, gap: ModelGap, parts: Mapping[str, Part], spread: Spread | None) -> Candidate | None:
    """Return a gap as a test candidate.

    The result is None for one seed if fewer than `ENOUGH` models have `SEEDS` seeds.
    """
    assert spread is not None, "parts are known"
    reference_part = spread.shrunk(_values(gap.reference, 0))
    model_part = planned = spread.shrunk(_values(gap.by_seed, 0))
    if len(gap.by_seed) < 2:
        three_seeds = [_values(g.by_seed, 0) for g in _model_gaps(measured) if len(g.by_seed) >= SEEDS]
        if len(three_seeds) < ENOUGH:
            return None
        widest = max(three_seeds, key=lambda values: float(np.var(values, ddof=1)))
        model_part = Part(float(np.var(widest, ddof=1)), spread.shrunk(widest).freedom)
    return Candidate(
        gap=float(gap.mean[0, 0]),
        as_tuned=float(gap.mean[0, 0] + measured.c[0, 0] * gap.octaves),
        seeds=(model_part, reference_part),
        counts=(len(gap.by_seed), len(gap.reference)),
        rest=tuple(parts[name] for name in ("rate", "beyond", "text")),
        planned=(planned, reference_part),
    )


def _with_verdicts(records: Records, rows: Sequence[Row], tested: Mapping[str, Candidate | None]) -> list[Row]:
    """Return rows with verdicts.

    The models in `records.asks` form one test family, all other models a second family.
    """
    limit = verdicts.LIMIT * records.unit.scale
    main_family = records.asks or [model for model in records.models if model not in records.references]
    decided: dict[str, Verdict] = {}
    for is_main in (True, False):
        family = {
            row.model: candidate
            for row in rows
            if (row.model in main_family) is is_main and (candidate := tested.get(row.model)) is not None
        }
        several = [row.seeds > 1 for row in rows if row.model in family]
        decided |= dict(zip(family, verdicts.decide(list(family.values()), several, limit=limit), strict=True))
    few = Verdict(verdicts.UNDECIDED, FEW_SEEDS)
    return [row if row.gap is None else dataclasses.replace(row, verdict=decided.get(row.model, few)) for row in rows]


FEW_SEEDS = "2 more seeds of both"
