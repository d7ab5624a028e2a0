"""Run a judgement's phases: choose the runs, train them, and decide between phases.

Without a known learning-rate slope, the mixer and the references train the same learning rates with seed 0. Further
seeds then train at one rate that suits all models. If joined studies supply the slope (seqjax/study/judge/joined.py),
each model's seeds train at the model's best rate, and references from these studies need not be trained.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from seqjax import store
from seqjax.errors import UserError
from seqjax.study.gaps import classes
from seqjax.study.gaps.rates import NEAR
from seqjax.study.judge import costs, page
from seqjax.study.judge.joined import rounded
from seqjax.study.judge.page import Judgement
from seqjax.study.judge.plan import SAME_BLOCK, Plan, Runs, make_plan, title
from seqjax.study.judge.soundness import require_sound
from seqjax.study.report.results import analyse
from seqjax.study.runs import estimate, files, identity, runner
from seqjax.study.runs.collect import collect, read_points
from seqjax.study.runs.record import in_domain
from seqjax.study.runs.runner import Run
from seqjax.terminal import tell
from seqjax.training import schedule
from seqjax.training.workdir import recorded_mixers

MAX_EXCESS = 0.1  # nats in domain at the first end: a learning rate that is worse than another by more is dropped


def judge(
    config: str | Path,
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    references: str | Path | None = None,
    seeds: int = 3,
    rates: Sequence[float] = (),
    match: str | None = None,
    runs: Sequence[str | Path] | str | Path = (),
) -> Judgement:
    """Judge a config's mixer, as `seqjax judge` does, and return the result.

    Args:
        config: The config, `FILE_OR_NAME[:SIZE[,...]]`. Each run is a process, so the mixer must be in a file.
        out: Directory for the runs and the page; default runs/judge/NAME. An existing judgement is resumed.
        jobs: Number of concurrent runs, each on a separate GPU if there are GPUs; default 1.
        references: Directory with attention's runs, shared by all judgements; default ~/.cache/seqjax/references.
        seeds: Number of seeds for the mixer and the references; a single seed has no interval.
        rates: Learning rates for the mixer and the references; default: the size's recorded rates.
        match: "params" sets the MLP width that matches the reference's parameters, "none" does not. By default a user's
            config is matched unless it sets `model.mlp.dim`.
        runs: Directories with finished studies that join; they need the same data, tokens and optimiser.

    Raises `UserError` for a config that cannot be judged, a mixer that fails its checks, or a run that fails.
    """
    several = [runs] if isinstance(runs, str | Path) else runs
    return run(
        plan_of(str(config), out, references, seeds, [str(x) for x in rates], match, several), jobs=checked_jobs(jobs)
    )


def plan_of(
    config: str,
    out: str | Path | None,
    references: str | Path | None,
    seeds: int,
    rates: Sequence[str],
    match: str | None,
    runs: Sequence[str | Path],
    *,
    needs_data: bool = True,
) -> Plan:
    """Return the plan of a judgement from the arguments of `judge`; a dry run needs no data."""
    try:
        numbers = [float(rate) for rate in rates]
    except ValueError:
        raise UserError(f"--rates={','.join(rates)}: give learning rates, such as 1e-3,2e-3,4e-3.") from None
    name, _, argument = config.partition(":")
    folder = "-".join([Path(name).stem, *filter(str.isalnum, argument.replace("_", "").split(","))])
    return make_plan(
        config,
        out=store.local(out, "--out") if out is not None else Path("runs") / "judge" / folder,
        cache=store.local(references, "--references") if references is not None else None,
        seeds=seeds,
        rates=numbers,
        match=match,
        runs=[store.local(path, "--runs") for path in runs],
        needs_data=needs_data,
    )


def checked_jobs(jobs: int | None) -> int:
    """Return the number of concurrent runs, 1 by default."""
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {jobs}.")
    return jobs or 1


# ------------------------------------------------------------------------------------------------------- what to train
Cell = tuple[str, float, int]  # model, learning rate, seed


class Losses:
    """Provide last losses by model, learning rate and seed.

    They come from the judgement's runs and from joined studies.
    """

    def __init__(self, runs: Runs):
        self.runs, self.plan = runs, runs.plan
        self.supplied = {
            (run.model, run.metadata["config"]["optim"]["lr"], run.seed): run
            for run in self.plan.joined.runs
            if run.model in self.plan.references
        }

    def last(self, model: str, rate: float, seed: int) -> float | None:
        """Return a cell's last in-domain loss; None before the last end."""
        if record := self.supplied.get((model, rate, seed)):
            return float(in_domain([record.last], self.plan.against)[0])
        run = self.runs.known(model, rate, seed=seed)
        if run is None or run.ends[-1] != self.plan.config.train.steps:
            return None
        return loss_at(run, run.ends[-1], self.plan.against)

    def by_rate(self, model: str) -> dict[float, float]:
        """Return the last in-domain loss with seed 0, by learning rate.

        Only rates that reached the last end are included.
        """
        rates = {rate for name, rate, _ in self.supplied if name == model} | {*self.runs.tried(model)}
        losses = {rate: self.last(model, rate, 0) for rate in sorted(rates)}
        return {rate: loss for rate, loss in losses.items() if loss is not None}

    def by_model(self) -> dict[str, dict[float, float]]:
        """Return `by_rate` for the mixer and both references."""
        return {name: self.by_rate(name) for name in (self.plan.model, *self.plan.references)}

    def seeds(self, model: str, rate: float) -> int:
        """Return how many of the plan's seeds reached the last end."""
        return sum(self.last(model, rate, seed) is not None for seed in range(self.plan.seeds))

    def is_enough(self, model: str) -> bool:
        """Return whether joined studies have enough seeds of a reference.

        They need the plan's number of seeds at one near-best rate.
        """
        near = self.plan.joined.near(model)
        return any(sum(run.rate == other.rate for other in near) >= self.plan.seeds for run in near)

    def trained(self) -> list[str]:
        """Return the references that joined studies do not supply."""
        has_slope = self.plan.joined.has_slope
        return [name for name in self.plan.references if not (has_slope and self.is_enough(name))]

    def missing(self, cells: Sequence[Cell]) -> list[Run]:
        """Return the runs for cells that joined studies do not supply."""
        return [self.runs.run(m, rate, seed=seed) for m, rate, seed in cells if (m, rate, seed) not in self.supplied]


def beyond(tried: Collection[float], losses: Mapping[float, float]) -> float | None:
    """Return the rate that extends a grid, half or twice its best rate.

    The result is None if the best rate is inside the grid or there are no losses.
    """
    if not losses:
        return None
    best = min(losses, key=losses.__getitem__)
    return rounded(2 * best) if best == max(tried) else rounded(best / 2) if best == min(tried) else None


def common_rate(
    losses: Mapping[str, Mapping[float, float]], model: str, *, with_seeds: Collection[float] = ()
) -> float | None:
    """Return the learning rate for all models' further seeds.

    The result is None if no rate is near-best for both the mixer and attention with the same block.

    Args:
        losses: Model -> learning rate -> last in-domain loss, for the mixer and both references.
        model: The mixer's model.
        with_seeds: Rates at which the reference already has its seeds; they are preferred.

    A rate's excess in a set of models is the largest loss difference to a model's best rate. The result minimises the
    excess of the mixer and attention with the same block, then the excess of all models.
    """
    shared = set.intersection(*(set(rates) for rates in losses.values()))

    def excess(rate: float, names: Collection[str]) -> float:
        return max(losses[name][rate] - min(losses[name].values()) for name in names)

    pair = (model, SAME_BLOCK)
    near = [rate for rate in shared if excess(rate, pair) <= NEAR]
    candidates = [rate for rate in near if rate in with_seeds] or near
    return min(candidates, key=lambda rate: (excess(rate, pair), excess(rate, losses)), default=None)


# --------------------------------------------------------------------------------------------------------------- phases
def run(plan: Plan, *, jobs: int) -> Judgement:
    """Train a judgement's missing runs, write its page and return its result.

    Raises `UserError` if a run fails for a reason other than a non-finite loss. Raises `KeyboardInterrupt` after a
    signal, once all runs have ended.
    """
    runs = Runs(plan)
    for line in page.head(plan):
        tell(line)
    if not plan.study.is_file():
        require_sound(plan)
    losses, rates = Losses(runs), list(runs.rates)
    references = losses.trained()
    # A study file needs a run of a reference from the start, if any reference is trained.
    losses.missing([(name, rate, 0) for rate in rates for name in references])
    _train_rates(losses, [plan.model], rates, jobs=jobs)
    extended = [*rates]
    if (rate := beyond(rates, losses.by_rate(plan.model))) is not None:
        extended.append(rate)
        _train_rates(losses, [plan.model], extended, jobs=jobs)
    if not losses.by_rate(plan.model):
        return page.write_diverged(plan, runs.runs(), extended)
    _train_rates(losses, references, rates if plan.joined.has_slope else extended, jobs=jobs)
    if silent := [name for name in plan.references if not losses.by_rate(name)]:
        raise UserError(
            f"{', '.join(silent)}: the loss is not finite at any learning rate; add a lower one, --rates=A,B."
        )
    seed_rates = rates_for_seeds(losses)
    cells = [(name, rate, seed) for seed in range(1, plan.seeds) for name, rate in seed_rates.items()]
    if cells:
        _train(runs, losses.missing(cells), jobs=jobs, doing="further seeds")
    missing = {run.label: why_missing(run) for run in runs.runs() if not run.complete}
    write_results(plan, runs, missing)
    return page.write(plan, runs, missing=missing, tried=extended, losses=losses.by_model())


def dry_run(plan: Plan, *, jobs: int) -> str:
    """Return a table with the remaining runs, tokens and time, and costs per mixer.

    Speeds are recorded, or timed for a few steps on this machine. The rate that extends the grid and the rate for
    further seeds are unknown before training; the table assumes values. The costs are for a first mixer and a second
    mixer.
    """
    runs = Runs(plan)
    losses = Losses(runs)
    models = [plan.model, *losses.trained()]
    rates = [*runs.rates, rounded(2 * max(runs.rates))]
    seeds = [(model, runs.rates[-1], seed) for seed in range(1, plan.seeds) for model in models]
    cells = [(model, rate, 0) for model in models for rate in rates] + seeds
    if plan.joined.has_slope:
        cells = [cell for cell in cells if cell[0] == plan.model or cell[1] != rates[-1]]
    chosen = losses.missing(cells)
    first, second = (
        sum(run.progress[1] for run in selected) / plan.config.train.steps
        for selected in (chosen, [run for run in chosen if run.model == plan.model])
    )
    lines = [
        *page.head(plan),
        estimate.report(chosen, jobs=jobs),
        f"Assumed learning rates: {rates[-1]:g} extends the grid, {runs.rates[-1]:g} is for further seeds.",
        f"A first mixer costs {first:.1f} times the steps of one run; a second mixer with the same references costs "
        f"{second:.1f} times.",
    ]
    return "\n".join(lines)


def rates_for_seeds(losses: Losses) -> dict[str, float]:
    """Return the learning rate for further seeds, by model; {} if no rate suits all."""
    plan = losses.plan
    by_model = losses.by_model()
    trained = [plan.model, *losses.trained()]
    if plan.joined.has_slope:
        return {name: min(by_model[name], key=by_model[name].__getitem__) for name in trained}
    with_seeds = [rate for rate in by_model[SAME_BLOCK] if losses.seeds(SAME_BLOCK, rate) >= plan.seeds]
    rate = common_rate(by_model, plan.model, with_seeds=with_seeds)
    return {} if rate is None else dict.fromkeys(trained, rate)


def _train_rates(losses: Losses, models: Sequence[str], rates: Sequence[float], *, jobs: int) -> None:
    """Train seed 0 at several learning rates; shorten runs that are much worse."""
    runs, against = losses.runs, losses.plan.against
    chosen = losses.missing([(model, rate, 0) for rate in rates for model in models])

    def may_stop(run: Run) -> bool:
        return is_much_worse(run, [other for other in chosen if other.model == run.model], against)

    _train(runs, chosen, jobs=jobs, doing=f"learning rates of {' and '.join(models)}", may_stop=may_stop)
    for run in [run for run in chosen if may_stop(run)]:
        runs.drop(run)
    runs.write()


def _train(
    runs: Runs,
    chosen: Sequence[Run],
    *,
    jobs: int,
    doing: str,
    may_stop: Callable[[Run], bool] = lambda run: False,
) -> None:
    """Train incomplete runs; raise `UserError` if one fails.

    A non-finite loss is not a failure.
    """
    runs.write()
    for run in chosen:
        identity.require(run)
    incomplete = [run for run in chosen if not run.complete and not has_diverged(run) and not may_stop(run)]
    if not incomplete:
        return
    tell(f"Training {doing}: {len(incomplete)} run{'s' * (len(incomplete) > 1)}.")
    for run in incomplete:
        costs.note_jobs(run, jobs=min(jobs, len(incomplete)))
    failed = runner.train_all(str(runs.plan.study), incomplete, jobs=jobs, may_stop=may_stop)
    if broken := [run for run in failed if not has_diverged(run)]:
        raise UserError(
            f"{', '.join(run.label for run in broken)} failed: see {broken[0].log}. Fix the cause and run this again."
        )
    for run in incomplete:
        recorded = recorded_mixers(run.files) if run.model == runs.plan.model else runs.plan.code
        if recorded != runs.plan.code and not may_stop(run):
            raise UserError(
                f"{run.label}: the mixer's file changed during the judgement. Judge it again with another --out."
            )


def write_results(plan: Plan, runs: Runs, missing: Mapping[str, str]) -> None:
    """Write the study's files, with joined runs, and its tables and pictures."""
    chosen = [run for run in runs.runs() if run.label not in missing]
    records = collect(chosen, [*plan.domains, *plan.against])
    study = {
        "title": title(plan),
        "references": list(plan.references),
        "domains": list(plan.domains),
        "against": list(plan.against),
        "asks": [plan.model],
        "speeds": costs.speeds(plan, runs.runs()),
    }
    workdirs = {run.label: run.workdir for run in chosen}
    messages = files.write(plan.out, records, study=study, missing=dict(missing), workdirs=workdirs)
    sums, _ = classes.collect(workdirs)
    if plan.joined.runs:
        messages += files.join(plan.out, plan.joined.by_directory)
        for directory, joined in plan.joined.by_directory.items():
            own_labels = {run.label.partition(": ")[2]: run.label for run in joined if run.model in plan.references}
            sums |= {
                own_labels[label]: class_sums
                for label, class_sums in classes.read(directory).items()
                if label in own_labels
            }
    classes.write(plan.out, sums)
    for message in messages:
        tell(message)
    analyse(plan.out, quiet=True)


# ------------------------------------------------------------------------------------------ decisions from files
def loss_at(run: Run, step: int, against: Sequence[str]) -> float | None:
    """Return the mean loss over `against` at an end; None before its evaluation."""
    if step in run.lacking:
        return None
    point = read_points(schedule.end_directory(run.files, step))[-1]
    return float(np.mean([point.domains[domain] for domain in against]))


def has_diverged(run: Run) -> bool:
    """Return whether a run stopped because its loss was not finite.

    Such a run keeps its last batch in not_finite_step*.npz.
    """
    return not run.complete and next(run.files.rglob("not_finite_step*.npz"), None) is not None


def is_much_worse(run: Run, others: Collection[Run], against: Sequence[str]) -> bool:
    """Return whether an incomplete run is more than `MAX_EXCESS` worse than another run.

    The losses are in domain, at the first end.
    """
    return not run.complete and excess_loss(run, others, against) > MAX_EXCESS


def excess_loss(run: Run, others: Collection[Run], against: Sequence[str]) -> float:
    """Return a run's first-end loss minus the lowest in `others`, in nats.

    The loss is in domain. The result is 0 if the run or all others have not reached their first end.
    """
    run_loss = loss_at(run, run.ends[0], against)
    losses = [loss_at(other, other.ends[0], against) for other in others if other.index != run.index]
    known = [loss for loss in losses if loss is not None]
    return 0.0 if run_loss is None or not known else run_loss - min(known)


def why_missing(run: Run) -> str:
    """Return the reason for a run without results."""
    return "the loss is not finite" if has_diverged(run) else "not part of this judgement"
