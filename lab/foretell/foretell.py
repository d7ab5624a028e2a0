"""Correlate small-task scores with a study's OOD losses, over mixers.

    python -m lab.foretell --size=small --study=lab/results/trunks_110m --study=lab/results/hybrids

The five tasks and scores in `PRIMARY` were pre-registered. `LATER` was chosen after seed 0 had run; it only uses
later seeds, and is tested again on mixers that were added afterwards. The unit is a mixer. x is its mean score over
seeds, at the learning rate that is best on validation sequences. y is its OOD loss at a near-best rate, averaged over
seeds and domains. z is its in-domain loss. Better models are better at everything, so the correlation controls for z:
with ranks R,

    rho = corr(e_x, e_y),    e_x = R(x) - its regression on 1 and R(z),    e_y likewise

(partial rank correlation). It is negative if higher scores mean lower OOD losses. The mean negative log-likelihood of
the answers breaks ties between scores. The gap at equal loss cannot serve as y, because z is one of its terms.
rank_correlation.py computes the interval over mixers and seeds, and the p-value of the largest |rho| among the tasks.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lab.foretell.rank_correlation import (
    Means,
    Statistic,
    break_ties,
    interval,
    p_values,
    rank_correlation,
    reliability,
)
from seqjax.config import presets
from seqjax.errors import UserError
from seqjax.evals.recall import report
from seqjax.evals.recall.setups import MODELS, Setup
from seqjax.reading import Float, check
from seqjax.study.gaps import shown_runs
from seqjax.study.gaps.statistics import LEVEL
from seqjax.study.runs import record
from seqjax.study.runs.record import Records


class Primary(NamedTuple):
    """A task score: the mean of `number` over `tests`; higher is better.

    Empty `tests` selects all tests. `seeds` restricts the runs (empty: all seeds). The rate is always chosen with all
    seeds.
    """

    task: str
    tests: tuple[str, ...] = ()
    number: str = "accuracy"
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The task name, with the tests if `seeds` is restricted."""
        return ", ".join((self.task, *self.tests)) if self.seeds else self.task

    @property
    def about(self) -> str:
        """A description: the number, its tests and seeds."""
        tests = f"{self.number}, {'; '.join(self.tests) or 'mean of all tests'}"
        return f"{tests}, seeds {' and '.join(map(str, self.seeds))}" if self.seeds else tests


PRIMARY = (
    Primary("mqar"),
    Primary("fuzzy", ("12, first token",)),
    Primary("hops", ("2 of 24",)),
    Primary("grammar", ("3-4 rules",), "score"),
    Primary("capacity", ("40,000",), "score"),
)
# Chosen after seed 0 had run and before the other seeds: twice the number of values in training.
LATER = Primary("fuzzy", ("24, first token",), seeds=(1, 2))
# Mixers that had run when LATER was chosen. Only new mixers test it independently.
SEEN_MIXERS = (
    *("Transformer++", "Transformer++, QK norm", "Transformer++, QK norm, conv", "W=256, QK norm", "FoX"),
    *("Top-1 Chunk, exact", "Top-1 Chunk, approx", "Top-1 Chunk, best key", "Top-1 Chunk, shortlist"),
    *("Based", "GLA", "mLSTM", "Mamba-2", "Mamba-3", "RWKV-5", "RWKV-6", "RWKV-7"),
    *("DeltaNet", "Gated DeltaNet", "Gated DeltaProduct", "KDA", "KDA, attention 1 in 4"),
)
# Family -> configs; a hybrid belongs to its most frequent mixer's family. Any other config is a separate family.
FAMILIES = {
    "attention": ("transformer", "transformer_pp", "fox", "path"),
    "selection": ("top1_element", "top1_chunk", "moba", "nsa"),
    "linear attention": ("based", "gla", "mlstm"),
    "Mamba": ("log_linear_mamba2", "mamba1", "mamba2", "mamba3"),
    "RWKV": ("rwkv5", "rwkv6", "rwkv7"),
    "delta rule": ("deltanet", "gated_deltanet", "gated_deltaproduct", "kda"),
}
ATTENDS = ("attention", "selection")  # families that read past tokens directly instead of a compressed state
LEAST = 10  # minimum mixers: with fewer, |rho| below 0.7 is not significant, and a bootstrap draw often has 4 or 5
SEEDS = 3  # planned minimum of seeds, and of learning rates, per mean
NEAR = 0.02  # scores this close to the floor or the ceiling carry no information
DRAWS = 2000


@dataclasses.dataclass(frozen=True)
class Scores:
    """A mixer's results in one task at its best learning rate.

    Attributes:
        values: Score and minus the bits per answer, [seeds, 2].
        n_rates: Number of learning rates tried.
        state: State elements of the model.
        parameters: Parameters of the model.
        edges: Floor and ceiling of an accuracy; empty for other scores.
        validated: Whether the rate was chosen on validation sequences.
    """

    values: np.ndarray
    n_rates: int = 1
    state: int = 0
    parameters: int = 0
    edges: tuple[float, ...] = ()
    validated: bool = False

    @property
    def mean(self) -> float:
        """The mean score over seeds."""
        return float(self.values[:, 0].mean())


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A mixer's losses in the study, and its task scores by name.

    `inside` is the in-domain loss [seeds], and `outside` the OOD loss [seeds, domains].
    """

    label: str
    inside: np.ndarray
    outside: np.ndarray
    scores: Mapping[str, Scores] = dataclasses.field(default_factory=dict)

    @property
    def family(self) -> str:
        """The mixer's family in `FAMILIES`, or its config name."""
        config = MODELS[self.label].partition(":")[0]
        return next((family for family, configs in FAMILIES.items() if config in configs), config)


class Row(NamedTuple):
    """Statistics of one score over its mixers.

    `statistics` is empty with fewer than `LEAST` mixers. `near` is the number of mixers near the floor or the ceiling.
    """

    primary: Primary
    mixers: list[Mixer]
    statistics: dict[str, Statistic]
    near: int

    @property
    def name(self) -> str:
        """The score's name."""
        return self.primary.name

    @property
    def informative(self) -> bool:
        """Whether fewer than a third of the mixers are near the floor or the ceiling."""
        return 3 * self.near < len(self.mixers)

    @property
    def answer(self) -> str:
        """The verdict in words: whether the task predicts the losses."""
        if not self.mixers:
            return "not run"
        if not self.statistics:
            return f"{len(self.mixers)} mixers are too few"
        if not self.informative:
            return f"uninformative: {self.near} of {len(self.mixers)} at the floor or the ceiling"
        if self.statistics["p"].value > 1 - LEVEL:
            return "undecided"
        return "predicts" if self.statistics["rho"].value < 0 else "higher scores, higher losses"


def foretell(
    every: Sequence[Mixer],
    domains: Sequence[str],
    gaps: Mapping[str, float],
    primaries: Sequence[Primary] = PRIMARY,
) -> list[Row]:
    """Return one row per score, over the mixers that have it.

    `gaps` are the gaps to a reference by label.
    """
    rows, tested = [], []
    for primary in primaries:
        name = primary.name
        mixers = [mixer for mixer in every if name in mixer.scores]
        near = sum(_near_an_edge(mixer.scores[name]) for mixer in mixers)
        statistics: dict[str, Statistic] = {}
        if len(mixers) >= LEAST:
            statistics = _statistics(mixers, name, domains, gaps)
            tested.append((np.array([every.index(mixer) for mixer in mixers]), *_variables(mixers, name)))
        rows.append(Row(primary, mixers, statistics, near))
    p = iter(p_values(tested, n=len(every)))
    return [
        row._replace(statistics=row.statistics | {"p": Statistic(next(p))}) if row.statistics else row for row in rows
    ]


def _near_an_edge(scores: Scores) -> bool:
    return any(abs(scores.mean - edge) < NEAR for edge in scores.edges)


def _variables(mixers: Sequence[Mixer], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, y and z, each [mixers]."""
    x = break_ties(Means([mixer.scores[name].values for mixer in mixers]).all())
    return x, np.array([m.outside.mean() for m in mixers]), np.array([m.inside.mean() for m in mixers])


def _statistics(
    mixers: Sequence[Mixer], name: str, domains: Sequence[str], gaps: Mapping[str, float]
) -> dict[str, Statistic]:
    """Return a score's statistics, except p."""
    scores = [mixer.scores[name] for mixer in mixers]
    x, y, z = _variables(mixers, name)
    rho = float(rank_correlation(x, y, z))

    def of(keep: np.ndarray, *others: Sequence[int] | np.ndarray) -> float:
        """Return rho over the mixers in `keep`, controlling for z and `others`.

        It is nan for fewer than five mixers.
        """
        more = [np.array(values)[keep] for values in others]
        return float(rank_correlation(x[keep], y[keep], z[keep], *more)) if keep.sum() > 4 else np.nan

    of_x = Means([of_mixer.values for of_mixer in scores])
    of_y = Means([np.stack([mixer.outside.mean(1), mixer.inside], 1) for mixer in mixers])
    rng = np.random.default_rng(0)

    def drawn(indices: np.ndarray) -> np.ndarray:
        losses = of_y.drawn(indices, rng)
        return rank_correlation(break_ties(of_x.drawn(indices, rng)), losses[..., 0], losses[..., 1])

    families = np.array([mixer.family for mixer in mixers])
    attends = np.isin(families, ATTENDS)
    members = [np.flatnonzero(families == name) for name in sorted(set(families))]
    clusters: dict[int, list[np.ndarray]] = {}  # by number of mixers, to compute equal-sized draws together
    for choice in rng.integers(len(members), size=(DRAWS, len(members))):
        cluster = np.concatenate([members[i] for i in choice])
        clusters.setdefault(len(cluster), []).append(cluster)
    by_family = np.concatenate([drawn(np.array(same)) for same in clusters.values()])
    everyone, alone = np.ones(len(mixers), bool), np.eye(len(mixers), dtype=bool)
    with_gap = np.array([mixer.label in gaps for mixer in mixers])
    of_gap = np.array([gaps[mixer.label] for mixer in mixers if mixer.label in gaps])
    plain_gap = float(rank_correlation(x[with_gap], of_gap)) if with_gap.sum() > 4 else np.nan
    statistics = {
        "rho": interval(rho, drawn(rng.integers(len(mixers), size=(DRAWS, len(mixers))))),
        "rho, by family": interval(rho, by_family),
        "one mixer left out": _range(rho, [of(~one) for one in alone]),
        "one family left out": _range(rho, [of(families != name) for name in set(families)]),
        "also controlling for attention": Statistic(of(everyone, attends)),
        "mixers that do not attend": Statistic(of(~attends)),
        "also controlling for state size": Statistic(of(everyone, [of_mixer.state for of_mixer in scores])),
        "also controlling for parameters": Statistic(of(everyone, [of_mixer.parameters for of_mixer in scores])),
        "plain": Statistic(float(rank_correlation(x, y))),
        "plain, with the gap": Statistic(plain_gap),
        "reliability of the score": Statistic(reliability([of_mixer.values[:, 0] for of_mixer in scores])),
        "reliability of the loss": Statistic(reliability([mixer.outside.mean(1) for mixer in mixers])),
    }
    of_domains = zip(domains, np.array([mixer.outside.mean(0) for mixer in mixers]).T, strict=True)
    return statistics | {name: Statistic(float(rank_correlation(x, losses, z))) for name, losses in of_domains}


def of_every_test(
    every: Sequence[Mixer], results: Sequence[Mapping[str, Any]], setup: Setup
) -> list[tuple[Primary, int, float, float]]:
    """Return (score, number of mixers, rho, rho controlling for attention) per test.

    The last value also controls for whether a mixer attends. There is no significance test.
    """
    rows = []
    for primary in PRIMARY:
        for test in setup.task(primary.task).tests:
            score = primary._replace(tests=(test,))
            scored = with_scores(every, results, setup, primaries=[score])
            mixers = [mixer for mixer in scored if mixer.scores]
            if len(mixers) >= LEAST:
                variables = _variables(mixers, score.name)
                attends = np.array([mixer.family in ATTENDS for mixer in mixers])
                rhos = (float(rank_correlation(*variables, *others)) for others in ((), (attends,)))
                rows.append((score, len(mixers), *rhos))
    return rows


def _range(value: float, values: Sequence[float]) -> Statistic:
    known = [v for v in values if not np.isnan(v)]
    return Statistic(value, min(known), max(known)) if known else Statistic(value)


def read_study(study: Records, chosen: Sequence[str] | None) -> list[Mixer]:
    """Return a study's mixers with their losses at a near-best rate.

    `seqjax.study.gaps.shown_runs` chooses the rate. A model corresponds to the mixer with the same label in
    `seqjax.evals.recall.setups.MODELS`. `chosen` restricts the labels. Raises `UserError` for a model without such a
    mixer, and if the mixer's settings differ in the study.
    """
    names = study.models
    if chosen is None and (unknown := [name for name in names if name not in MODELS]):
        raise UserError(
            f"The study has models without a mixer in `seqjax recall`: {'; '.join(unknown)}. Select known mixers with "
            f"--models={';'.join(name for name in names if name in MODELS)}, or add the models to MODELS in "
            "seqjax/evals/recall/setups.py."
        )
    every = []
    for name in (name for name in names if name in (names if chosen is None else chosen)):
        if runs := shown_runs(study, name):
            if differing := other_settings(runs[0].metadata.get("config", {}), name):
                raise UserError(f"{name!r} has other settings in the study than in `seqjax recall`: {differing}.")
            ends = [run.last for run in runs]
            inside = record.in_domain(ends, study.against)
            every.append(Mixer(name, inside, record.losses(ends, study.domains)))
    return every


def other_settings(recorded: Mapping[str, Any], label: str) -> str:
    """Return the first setting that differs from a label's mixer, or "".

    `recorded` is the config of a run. Only names, switches and windows are compared. Other numbers, such as heads,
    depend on the model size. So does a window that the label's config does not set (NSA's).
    """
    name, _, settings = MODELS[label].partition(":")
    model: Any = presets.read_config(f"{name}:{','.join(filter(None, ('debug', settings)))}").model
    was, now = recorded.get("model", {}).get("mixer", model.mixer), model.mixer
    was, now = (list(mixer) if isinstance(mixer, list | tuple) else [mixer] for mixer in (was, now))
    if len(was) != len(now):
        return f"it alternates {len(was)} mixers, not {len(now)}"
    for one, other in zip(was, now, strict=True):
        for key in (key for key in one if key in other and key != "implementation"):
            pair = one[key], other[key]
            sized = key == "window" and all(pair) and "window" not in settings
            compared = key == "window" or any(isinstance(value, bool | str) for value in pair)
            # old configs use 0 for no window
            if compared and not sized and (pair[0] or None) != (pair[1] or None):
                return f"{key} is {pair[0]!r}, not {pair[1]!r}"
    return ""


def with_scores(
    mixers: Sequence[Mixer],
    results: Sequence[Mapping[str, Any]],
    setup: Setup,
    *,
    passed: bool = False,
    primaries: Sequence[Primary] = (*PRIMARY, LATER),
) -> list[Mixer]:
    """Return the mixers with scores from their runs at the setup's first width.

    `passed` leaves out runs that failed the easiest training test.
    """
    scored = []
    for mixer in mixers:
        scores = {}
        for primary in primaries:
            wanted = (mixer.label, primary.task, setup.rounds[0][0])
            runs = [run for run in results if (run["model"], run["task"], run["dim"]) == wanted]
            if runs and (of_task := _scored(runs, primary, setup, passed=passed)):
                scores[primary.name] = of_task
        scored.append(dataclasses.replace(mixer, scores=scores))
    return scored


def _scored(runs: Sequence[Mapping[str, Any]], primary: Primary, setup: Setup, *, passed: bool) -> Scores | None:
    """Return one mixer's scores on one task at its best rate.

    The result is None without runs. `report.validated_rate` chooses the rate. Runs with a non-finite result are left
    out.
    """
    task = setup.task(primary.task)
    tests = primary.tests or tuple(task.tests)
    form = {"state": {task.own: int}, "parameters": int, "chance": float}
    form |= {"tests": {test: {primary.number: Float} for test in (*tests, task.own)}}
    finite = []
    for run in runs:
        check(run, form, f"{report.RESULTS}: {primary.task}, {run['model']}", fix=report.FIX)
        if all(np.isfinite(run["tests"][test][primary.number]) for test in (*tests, task.own)):
            finite.append(run)
    rate = report.validated_rate(finite, task.own, primary.number) if finite else None
    best = [run for run in finite if run["rate"] == rate and (not primary.seeds or run["seed"] in primary.seeds)]
    best = [run for run in best if not (passed and task.easy) or run["tests"][task.easy]["accuracy"] >= report.PASSED]
    if not best:
        return None
    # Old results have no bits, so their ties remain.
    values = [[(run["tests"][t][primary.number], -run["tests"][t].get("bits", 0.0)) for t in tests] for run in best]
    return Scores(
        np.array(values, float).mean(1),
        n_rates=len({run["rate"] for run in finite}),
        state=best[0]["state"][task.own],
        parameters=best[0]["parameters"],
        edges=(best[0]["chance"], 1.0) if primary.number == "accuracy" else (),
        validated=all("validation" in run for run in best),
    )
