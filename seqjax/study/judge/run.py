"""Judge a mixer: does it cost base capabilities, and how fast is it? `seqjax judge --config=FILE_OR_NAME[:SIZE[,...]]`.

It trains three learning rates of the mixer and seeds of the best one, and attention beside it as published and with the
same block, whose runs are kept in --references and cost nothing for a second mixer. It ends with one sentence and
writes DIR/judge.md; docs/judge.md describes both. The same command goes on wherever it was killed.

`--dry_run` lists the runs, their tokens and the time at recorded speeds, and trains nothing. `--rates=A,B,C` and
`--reference_rate=X` take the place of the recorded learning rates of the size.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax import mixers, store, testing
from seqjax.mixers import base
from seqjax.models import Model, flops
from seqjax.study import estimate, judge_page, judge_plan, protocol, runner
from seqjax.study.judge_page import Judgement
from seqjax.study.judge_plan import MODEL_ENDS, Plan, Runs
from seqjax.study.results import write_results
from seqjax.study.runner import Run
from seqjax.study.studies import load_study
from seqjax.training import schedule
from seqjax.utils import UserError, command_parser, run_command, words

BEHIND = 0.1  # nats in domain at the first end: a learning rate that is further behind another is dropped
EXTENSIONS = 2  # of the grid of learning rates, by a factor of two each
CLEARLY_WORSE = 0.1  # nats in domain: no seed of a mixer this far above the references ends below them
MOST_PARAMETERS = 2.0  # times those of the references, or one over it: the sizes are hardly comparable
# Not of whether the mixer is a sound one: FLOPs in loops that XLA cannot count, and a chunk that is part of the model.
UNCHECKED = ("flops", "chunk_size")
LENGTHS, SHORT = (
    ("chunk_size", "window"),
    8,
)  # settings that are numbers of tokens, and what a check takes for a long one


def main(argv: list[str]) -> None:
    """Judge a mixer and print the sentence."""
    parser = command_parser("judge", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE_OR_NAME[:SIZE[,...]]", help="the mixer's config")
    parser.add_argument("--out", type=Path, help="directory for the runs and the page (runs/judge/NAME)")
    parser.add_argument("--jobs", type=int, help="number of concurrent runs, each on its own GPU if there are any (1)")
    parser.add_argument("--references", type=Path, metavar="DIR", help="shared runs of attention (~/.cache/seqjax)")
    parser.add_argument("--seeds", default=3, type=int, help="seeds of the mixer and of the references (3)")
    parser.add_argument("--rates", default="", metavar="A,B,C", help="learning rates of the mixer (recorded ones)")
    parser.add_argument("--reference_rate", type=float, help="learning rate of both references (the recorded ones)")
    parser.add_argument("--dry_run", action="store_true", help="say what is left and how long it takes; train nothing")
    args = parser.parse_args(argv)
    plan = _plan(args.config, args.out, args.references, args.seeds, words(args.rates), args.reference_rate)
    jobs = _jobs(args.jobs)
    if args.dry_run:
        sys.stdout.write(dry_run(plan, jobs=jobs) + "\n")
        return
    try:
        found = run(plan, jobs=jobs)
    except KeyboardInterrupt:
        sys.stderr.write("Stopped; every run has saved where it is. Go on with the same command.\n")
        sys.exit(130)
    for warning in found.warnings:
        sys.stdout.write(f"* {warning}\n")
    sys.stdout.write(f"\n{found.sentence}\n{found.foretold}\nWritten: {found.out / judge_page.FILE}\n")


def judge(
    config: str | Path,
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    references: str | Path | None = None,
    seeds: int = 3,
    rates: Sequence[float] = (),
    reference_rate: float | None = None,
) -> Judgement:
    """Judge the mixer of a config, `FILE_OR_NAME[:SIZE[,...]]`, as `seqjax judge` does, and return what it found.

    Args:
        config: The config; its runs are trained in processes of their own, so its mixer must be in a file.
        out: Directory for the runs and the page, runs/judge/NAME by default. A judgement there is resumed.
        jobs: Number of concurrent runs, each on its own GPU if there are any; 1 by default.
        references: Directory of the runs of attention that all judgements share; ~/.cache/seqjax/references by default.
        seeds: Number of seeds of the mixer and of the references; fewer than three have no interval.
        rates: Learning rates of the mixer, those recorded for the size by default.
        reference_rate: Learning rate of both references, those recorded for the size by default.

    Raises `UserError` for a config that cannot be judged, a mixer that fails its checks, or a run that fails.
    """
    plan = _plan(str(config), out, references, seeds, [str(rate) for rate in rates], reference_rate)
    return run(plan, jobs=_jobs(jobs))


def _plan(
    config: str,
    out: str | Path | None,
    references: str | Path | None,
    seeds: int,
    rates: Sequence[str],
    reference_rate: float | None,
) -> Plan:
    for path, flag in ((out, "--out"), (references, "--references")):
        if path is not None:
            store.require_local(path, flag)
    try:
        numbers = [float(rate) for rate in rates]
    except ValueError:
        raise UserError(f"--rates={','.join(rates)}: give learning rates, such as 1e-3,2e-3,4e-3.") from None
    name, _, argument = config.partition(":")
    folder = "-".join([Path(name).stem, *filter(str.isalnum, argument.replace("_", "").split(","))])
    return judge_plan.make_plan(
        config,
        out=Path(out) if out is not None else Path("runs") / "judge" / folder,
        cache=Path(references) if references is not None else None,
        seeds=seeds,
        rates=numbers,
        reference_rate=reference_rate,
    )


def _jobs(jobs: int | None) -> int:
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {jobs}.")
    return jobs or 1


def dry_run(plan: Plan, *, jobs: int) -> str:
    """Return a table of the runs that are left, their tokens and their time at recorded speeds."""
    runs = Runs(plan)
    order = [runs.mixer(rate, seed=0, ends=MODEL_ENDS) for rate in middle_first(plan.rates)]
    order += [*runs.references, *runs.expected()]
    scale = judge_plan.SCALES.get(plan.config.size)
    said = [
        estimate.report(order, jobs=jobs),
        f"The seeds of {plan.model} run at its best learning rate, which is found first. If that is at the edge of the "
        f"grid, up to {EXTENSIONS} more are tried; a rate that is far behind at half of its tokens is dropped there.",
        scale.took if scale is not None else "",
    ]
    return "\n".join(filter(None, said))


# --------------------------------------------------------------------------------------------------------------- phases
def run(plan: Plan, *, jobs: int) -> Judgement:
    """Train what is missing of a judgement, write its page and return what it found.

    Raises `UserError` if a run fails for another reason than a loss that is not finite, and `KeyboardInterrupt` after a
    signal has ended all of them.
    """
    runs = Runs(plan)
    warnings = [*plan.warnings, *_parameters(plan)]
    if not plan.study.is_file():
        require_sound(plan)
    runs.write()
    for warning in warnings:
        sys.stdout.write(f"* {warning}\n")
    of_rates = find_rate(runs, jobs=jobs)
    best = best_rate(of_rates, plan.against)
    if best is None:
        return judge_page.write_diverged(plan, list(of_rates.values()), runs.references, warnings)
    references = runs.references
    _train(runs, references, jobs=jobs, doing="the references", later=runs.expected())
    diverged = [reference.label for reference in references if has_diverged(reference)]
    if diverged:
        raise UserError(
            f"{', '.join(diverged)}: the loss is not finite; give a lower --reference_rate, in a new --out."
        )
    ends = ends_of_seeds(of_rates[best], references, plan.against)
    seeds = _seeds(runs, best, ends)
    _train(runs, seeds, jobs=jobs, doing=f"seeds of {plan.model}")
    dropped = {r.label: why_dropped(r, of_rates.values(), plan.against) for r in of_rates.values() if not r.complete}
    lost = {run.label: "the loss is not finite" for run in seeds if has_diverged(run)}
    study = load_study(plan.study)
    used = {run.label for run in (*of_rates.values(), *references, *seeds)}
    others = {run.label: "not of this judgement" for run in study.runs if run.label not in used}
    write_results(study, plan.out, missing=dropped | lost | others, quiet=True)
    return judge_page.write(plan, study.runs, dropped=dropped | lost, warnings=warnings)


def _seeds(runs: Runs, rate: float, ends: Sequence[float]) -> list[Run]:
    return [runs.mixer(rate, seed=seed, ends=ends) for seed in range(1, runs.plan.seeds)]


def middle_first(rates: Sequence[float]) -> list[float]:
    """Return the rates ascending, but for the middle one, which is first."""
    ascending = sorted(rates)
    middle = ascending[len(ascending) // 2]
    return [middle, *(rate for rate in ascending if rate != middle)]


def find_rate(runs: Runs, *, jobs: int) -> dict[float, Run]:
    """Train one seed at every learning rate, extend the grid where the best is at its edge, and return all runs."""
    plan = runs.plan
    found = {rate: runs.mixer(rate, seed=0, ends=MODEL_ENDS) for rate in middle_first(plan.rates)}
    for extension in range(EXTENSIONS + 1):
        _train(
            runs,
            list(found.values()),
            jobs=jobs,
            doing=f"learning rates of {plan.model}",
            may_stop=lambda run: is_behind(run, found.values(), plan.against),
            later=[*runs.references, *runs.expected()],
        )
        rate = beyond(found, plan.against)
        if rate is None or extension == EXTENSIONS:
            break
        found[rate] = runs.mixer(rate, seed=0, ends=MODEL_ENDS)
    return found


def _train(
    runs: Runs,
    chosen: Sequence[Run],
    *,
    jobs: int,
    doing: str,
    may_stop: Callable[[Run], bool] = lambda run: False,
    later: Sequence[Run] = (),
) -> None:
    """Train the runs that are not complete; raise `UserError` if one fails but for a loss that is not finite."""
    runs.write()
    left = [run for run in chosen if not run.complete and not has_diverged(run) and not may_stop(run)]
    if not left:
        return
    sys.stdout.write(f"Training {doing}: {len(left)} run{'s' * (len(left) > 1)}.\n")
    for run in left:
        judge_page.note_jobs(run, jobs=min(jobs, len(left)))
    failed = runner.train_all(str(runs.plan.study), left, jobs=jobs, may_stop=may_stop, later=later)
    if broken := [run for run in failed if not has_diverged(run)]:
        raise UserError(
            f"{', '.join(run.label for run in broken)} failed; {broken[0].log} says why. Then go on with the same "
            "command."
        )


# ------------------------------------------------------------------------------------------ decisions, from files alone
def loss_at(run: Run, step: int, against: Sequence[str]) -> float | None:
    """Return the mean loss of the domains `against` at the end after `step`; None if it is not evaluated yet."""
    if step in run.lacking:
        return None
    point = protocol.read_points(schedule.end_directory(run.files, step))[-1]
    return float(np.mean([point.domains[domain] for domain in against]))


def has_diverged(run: Run) -> bool:
    """Return whether the run ended because its loss was not finite: it keeps the batch then."""
    return not run.complete and next(run.files.rglob("not_finite_step*.npz"), None) is not None


def is_behind(run: Run, others: Collection[Run], against: Sequence[str]) -> bool:
    """Return whether a run that is not complete is far behind another at its first end."""
    return behind(run, others, against) > BEHIND and not run.complete


def behind(run: Run, others: Collection[Run], against: Sequence[str]) -> float:
    """Return how much higher the loss in domain of a run is than the best one's at their first ends, in nats.

    It is 0 where the run or all others have no such end yet.
    """
    own = loss_at(run, run.ends[0], against)
    losses = [loss_at(other, other.ends[0], against) for other in others if other.index != run.index]
    known = [loss for loss in losses if loss is not None]
    return 0.0 if own is None or not known else own - min(known)


def why_dropped(run: Run, others: Collection[Run], against: Sequence[str]) -> str:
    """Return why a run of a learning rate is not complete."""
    if has_diverged(run):
        return "the loss is not finite"
    return f"dropped at half of its tokens, {behind(run, others, against):.2f} nats in domain behind another rate"


def best_rate(found: Mapping[float, Run], against: Sequence[str]) -> float | None:
    """Return the rate with the lowest loss in domain at the last end; None if no run is complete."""
    last = {rate: loss_at(run, run.ends[-1], against) for rate, run in found.items() if run.complete}
    return min(last, key=lambda rate: last[rate] or 0.0) if last else None


def beyond(found: Mapping[float, Run], against: Sequence[str]) -> float | None:
    """Return the rate by which the grid is extended, half or twice its best one at an edge; None if it is inside."""
    best = best_rate(found, against)
    if best is None:
        return None
    return 2 * best if best == max(found) else best / 2 if best == min(found) else None


def ends_of_seeds(run: Run, references: Sequence[Run], against: Sequence[str]) -> tuple[float, ...]:
    """Return the ends of further seeds: all, unless the mixer's last end is clearly above those of the references.

    The better one of a pair is interpolated between its ends; the worse one needs its last end alone.
    """
    own = loss_at(run, run.ends[-1], against)
    theirs = [loss_at(reference, reference.ends[-1], against) for reference in references]
    worst = max(loss for loss in theirs if loss is not None)
    assert own is not None, "the best rate is complete"
    return MODEL_ENDS[-1:] if own > worst + CLEARLY_WORSE else MODEL_ENDS


# --------------------------------------------------------------------------------------------------------------- checks
def _parameters(plan: Plan) -> list[str]:
    """Return a warning if the mixer's model is much larger or smaller than the references."""
    ours = flops.n_params(Model(plan.config.model, max_len=plan.config.train.seq_len))
    reference = judge_plan.read(plan.references[judge_plan.SAME_BLOCK])
    theirs = flops.n_params(Model(reference.model, max_len=reference.train.seq_len))
    if 1 / MOST_PARAMETERS <= ours / theirs <= MOST_PARAMETERS:
        return []
    return [
        f"{plan.model} has {ours / theirs:.2g} times the parameters of attention ({ours:,} and {theirs:,}): the gap is "
        "of two sizes as well."
    ]


# On a CPU and in a process of its own, so that this one takes no memory of a GPU from the runs.
CHECK = "import sys; from seqjax.study import judge; judge.check(sys.argv[1])"


def require_sound(plan: Plan) -> None:
    """Raise `UserError` unless every mixer of the config passes the contract tests (seqjax/testing.py)."""
    sys.stdout.write(f"Checking the mixer of {plan.model}: causality, decoding, gradients.\n")
    sys.stdout.flush()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, plan.text], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]).splitlines()
        raise UserError(f"The mixer cannot be judged before it passes seqjax.testing.check_mixer: {' '.join(said)}")


def check(text: str) -> None:
    """Run the contract tests on the mixers of a config; write what fails to stdout and exit with status 1."""
    for mixer in judge_plan.read(text).model.mixers:
        try:
            checked_mixer(mixer)
        except AssertionError as error:
            sys.stdout.write(str(error))
            sys.exit(1)


def checked_mixer(mixer: Any) -> list[str]:
    """Run the contract tests on a mixer with the settings of a config, and return the names of those that ran.

    The tests have small models, and most have sequences of 23 tokens: a longer chunk or window is a short one there,
    and settings that do not fit a small model are left at their defaults.
    """
    cls: type[base.Mixer] = mixers.load(mixer.name)
    settings = {key: value for key, value in vars(mixer).items() if key not in ("name", "heads", "rope_base")}
    known = mixers.settings_class(mixer.name)
    defaults = {key: getattr(known, key, None) for key in settings}
    given = {key: value for key, value in settings.items() if value != defaults[key]}
    given |= {key: SHORT for key in LENGTHS if isinstance(settings.get(key), int) and settings[key] > testing.LENGTH}
    given = dict(sorted(given.items(), key=lambda item: item[0] not in LENGTHS))  # these are given up last
    dims = (32, 64)
    error: UserError | None = None
    for n_given, dim in itertools.product(range(len(given), -1, -1), dims):
        try:
            return testing.check_mixer(cls, settings=dict(list(given.items())[:n_given]), dim=dim, skip=UNCHECKED)
        except UserError as refused:
            error = refused
    raise error or UserError(f"The mixer {mixer.name} cannot be checked.")


if __name__ == "__main__":
    run_command(main)
