"""The page of a judgement, DIR/judge.md, and the same as data: the sentence first, then how sure it is."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seqjax.models import Model, flops
from seqjax.reading import read_json, read_table
from seqjax.study import comparison, equal_loss, made_of, records
from seqjax.study.equal_loss import Row
from seqjax.study.judge_plan import IN_WORDS, SAME_BLOCK, Plan
from seqjax.study.rank_correlation import p_text
from seqjax.study.records import Records
from seqjax.study.runner import Run
from seqjax.study.tables import DASH, cell, markdown
from seqjax.study.verdict import verdict
from seqjax.utils import UserError, size, write_json

PACKAGE = Path(__file__).parents[1]
RESULTS = PACKAGE.parent / "docs" / "results" / "recall" / "foretell"
# What `seqjax recall --foretell` wrote of the recorded results; the same file, installed by a wheel.
FORETELL = (RESULTS if RESULTS.is_dir() else PACKAGE / "foretold") / "foretell.csv"
FORETELL_COLUMNS: dict[str, type] = dict.fromkeys(
    ("runs", "task", "mixers", "answer", "statistic", "value", "low", "high"), str
)
FORETELL_FIX = "restore it, or write it again with `seqjax recall --foretell`"
FILE = "judge.md"
JOBS = "judge.json"  # in a workdir: how many runs shared its device
SMOKE_TESTS = ("demo", "debug")  # sizes
WHY = {
    "interval": "the interval is too wide",
    "learning rates": "it depends on the learning rate",
    "number of models": "the gap is too small for the number of comparisons",
}


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The result of judging a mixer against two references, by the names of `judge_plan.REFERENCES`.

    `foretold` says which task of minutes foretells a loss out of domain best, if one is known to. `gaps` are in nats
    per token out of domain at equal loss in domain, positive where the mixer is worse, with half the width of the 95%
    interval in `half_widths`, and the lowest and highest gap over learning rates in `over_rates`. None stands for what
    could not be measured. By model, the mixer's `model` included: `tokens_per_s` in training, `peak_gib` of the
    device's memory, and `state_bytes` of decoding one sequence, at half the training length and at the training length.
    """

    model: str
    sentence: str
    foretold: str
    verdicts: dict[str, str]
    gaps: dict[str, float | None]
    half_widths: dict[str, float | None]
    over_rates: dict[str, tuple[float, float] | None]
    tokens_per_s: dict[str, float | None]
    peak_gib: dict[str, float | None]
    state_bytes: dict[str, dict[int, int]]
    warnings: tuple[str, ...]
    out: Path


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a model's runs: median training speed, peak memory, devices, and most runs at a time on one."""

    tokens_per_s: float | None
    peak_gib: float | None
    devices: frozenset[str]
    shared: int


def note_jobs(run: Run, *, jobs: int) -> None:
    """Write into a run's workdir how many runs are trained at a time, the most so far."""
    path = Path(run.workdir) / JOBS
    before = _jobs(path) if path.is_file() else 1
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"jobs": max(jobs, before)})


def _jobs(path: Path) -> int:
    return read_json(path, {"jobs": int}, fix="delete it; it says how many runs were trained at a time")["jobs"]


def cost(runs: Iterable[Run]) -> Cost:
    """Return the cost of the runs of one model, as far as they have been trained."""
    speeds, peaks, devices, shared = list[float](), list[float](), set[str](), 1
    for run in runs:
        files = run.files
        rows = run.rows()
        speeds += [row["tokens_per_s"] for row in rows if row["tokens_per_s"]]
        peaks += [row["device_peak_gib"] for row in rows if row.get("device_peak_gib")]
        if rows and (files / "run.json").is_file():
            devices.add(read_json(files / "run.json", {"device?": str}).get("device", ""))
        if rows and (files / JOBS).is_file():
            shared = max(shared, _jobs(files / JOBS))
    return Cost(float(np.median(speeds)) if speeds else None, max(peaks, default=None), frozenset(devices), shared)


def state_bytes(run: Run, *, on_cpu: bool) -> dict[int, int]:
    """Return the bytes of decoding one sequence, by its length: half the training length, and the training length."""
    assert run.config is not None, "a judgement trains its runs"
    settings, length = run.config.model, run.config.train.seq_len
    if settings.dtype == "auto":
        settings = dataclasses.replace(settings, dtype="float32" if on_cpu else "bfloat16")
    found = {}
    for n in (length // 2, length):
        model = Model(settings, max_len=n)
        cache = jax.eval_shape(lambda model=model, n=n: model.init_cache(1, n))
        found[n] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    return found


# ------------------------------------------------------------------------------------------------------------- the page
def write(plan: Plan, runs: Sequence[Run], *, dropped: Mapping[str, str], warnings: Sequence[str]) -> Judgement:
    """Write the page from the records in `plan.out`, and return what it says; `dropped` runs (label -> why) miss."""
    found = records.read(plan.out)
    rows = {name: _row(found, plan.model, name) for name in plan.references}
    costs = _costs(plan, runs)
    tried = {run.rate for run in runs if run.model == plan.model}
    several = [*warnings, *_warnings(plan, found, rows, dropped, tried), *_of_costs(plan, costs)]
    judgement = _judgement(plan, runs, sentence(plan, rows[SAME_BLOCK], costs), costs, several, rows)
    sums = made_of.read(plan.out)
    both = dataclasses.replace(found, runs=[run for run in found.runs if run.model in (plan.model, SAME_BLOCK)])
    sections = [
        *_head(judgement),
        f"{judgement.foretold}\n",
        "## Base capabilities\n",
        _readings(plan, rows),
        *(f"**Against {IN_WORDS[name]}** ({name}). {verdict(found, plan.model, name)}\n" for name in plan.references),
        "![gaps out of domain at equal loss in domain](gaps.png)\n" if (plan.out / "gaps.png").is_file() else "",
        "A gap is in nats per token out of domain at the same loss in domain, positive where the mixer is worse. The "
        "verdict must hold at every learning rate that is as good in domain as the best. All tables are in "
        "[gaps.md](gaps.md).\n",
        "## Speed, memory and decoding state\n",
        _cost_table(plan, judgement, costs),
        "## What it could not tell\n",
        _list(judgement.warnings) if judgement.warnings else "Nothing of what a judgement checks.\n",
        "## The scale that it speaks of\n",
        _scale(plan, runs, costs),
        made_of.section(both, sums, SAME_BLOCK),
    ]
    _write(plan, sections)
    return judgement


def write_diverged(
    plan: Plan, of_rates: Sequence[Run], references: Sequence[Run], warnings: Sequence[str]
) -> Judgement:
    """Write the page of a mixer whose loss was not finite at any learning rate, and return what it says."""
    costs = _costs(plan, [*of_rates, *references])
    rates = ", ".join(f"{run.config.optim.lr:g}" for run in of_rates if run.config is not None)
    start = f"{plan.model} diverged at every learning rate tried ({rates}), so that its cost cannot be told"
    said = f"{start}{_speed(plan, costs)}."
    several = [*warnings, "Lower learning rates (--rates) or a longer warm-up may train it.", *_of_costs(plan, costs)]
    judgement = _judgement(plan, [*of_rates, *references], said, costs, several, {})
    sections = [
        *_head(judgement),
        "## Speed, memory and decoding state\n",
        _cost_table(plan, judgement, costs),
        "## What it could not tell\n",
        _list(judgement.warnings),
        "## The scale that it speaks of\n",
        _scale(plan, [*of_rates, *references], costs),
    ]
    _write(plan, sections)
    return judgement


def sentence(plan: Plan, row: Row | None, costs: Mapping[str, Cost]) -> str:
    """Return the judgement in one sentence; `row` is the comparison with attention with the same block."""
    name, against = plan.model, IN_WORDS[SAME_BLOCK]
    if row is None:
        said = f"it cannot be told whether {name} costs base capabilities against {against}"
    else:
        gap = _gap(row)
        text = "" if gap is None else _number(gap.estimate.gap, gap.estimate.half_width)
        signed = "" if gap is None else f"{'+' if gap.estimate.gap >= 0 else '-'}{text}"
        words = row.verdict.words
        if words.startswith("costs"):
            said = f"{name} costs {text} nats out of domain against {against}"
            said += f", but not more than {equal_loss.LIMIT:.2g}" if "not more" in words else ""
        elif words == "gains":
            said = f"{name} gains {text} nats out of domain against {against}"
        elif words.startswith("does not cost"):
            said = f"{name} {words} nats out of domain against {against} ({signed})"
        else:
            why = WHY.get(row.verdict.why, row.verdict.why)
            measured = f"; measured: {signed} nats out of domain" if gap is not None else ""
            said = f"it cannot be told whether {name} costs base capabilities against {against} ({why}{measured})"
    scale = "In this smoke test" if plan.config.size in SMOKE_TESTS else "At this scale"
    return f"{scale}, {said}{_in_domain(row)}{_speed(plan, costs)}."


def _in_domain(row: Row | None) -> str:
    """Return that a mixer does not reach the reference's loss in domain, or passes it; "" if they are alike.

    The gap at equal loss does not show it: a mixer that learns less has none.
    """
    gap = 0.0 if row is None or row.inside is None else row.inside.estimate.gap
    if abs(gap) <= equal_loss.LIMIT:
        return ""
    return f"; after the same tokens its loss in domain is {_number(gap, None)} {'higher' if gap > 0 else 'lower'}"


def _speed(plan: Plan, costs: Mapping[str, Cost]) -> str:
    """Return the end of the sentence about training speed; "" if the two cannot be compared."""
    ratio = speed_ratio(costs[plan.model], costs[SAME_BLOCK])
    if ratio is None:
        return ""
    times = f"{ratio:.1f}" if ratio >= 0.95 else f"{ratio:.2f}"
    return f"; at {plan.config.train.seq_len:,} tokens it trains {times} times as fast"


def speed_ratio(ours: Cost, theirs: Cost) -> float | None:
    """Return how many times as fast a model trains as another; None unless both were measured on the same device."""
    if ours.tokens_per_s is None or theirs.tokens_per_s is None or ours.devices != theirs.devices:
        return None
    return ours.tokens_per_s / theirs.tokens_per_s if len(ours.devices) == 1 else None


def foretold(path: Path = FORETELL) -> str:
    """Return which task of minutes foretells the loss out of domain best, and how surely, or that none is known to.

    `path` is a table of `seqjax recall --foretell`. A task foretells if the permutations of all tasks say so and the
    interval of its rank correlation is below zero: higher scores lose less. A score that was fixed later is told beside
    the others if it does, with what it is of mixers that had not run then. Raises `UserError` if the table is damaged.
    """
    if not path.is_file():
        return f"Whether a task of minutes foretells the loss out of domain is not known here: {path} is missing."
    table = read_table(path, FORETELL_COLUMNS, fix=FORETELL_FIX)
    lines = [line for line in table if line["runs"] in ("all", "later", "new")]
    answers = {line["task"]: line["answer"] for line in lines if line["runs"] == "all"}
    later = {line["task"]: line["answer"] for line in lines if line["runs"] == "later"}
    found = {(line["task"] + ", new" * (line["runs"] == "new"), line["statistic"]): line for line in lines}

    def number(task: str, statistic: str, column: str) -> float:
        text = found[task, statistic][column] if (task, statistic) in found else ""
        try:
            return float(text or "nan")
        except ValueError:
            raise UserError(
                f"{path}: {column} of {statistic} of {task} is {text!r}, not a number; {FORETELL_FIX}."
            ) from None

    def numbers(task: str) -> str:
        value, low, high = (number(task, "rho", name) for name in ("value", "low", "high"))
        zero = ", which contains zero" if low <= 0 <= high else ""
        return (
            f"rank correlation {value:+.2f}, 95% interval {low:+.2f} to {high:+.2f}{zero}; "
            f"{p_text(number(task, 'p', 'value'))}, {found[task, 'p']['mixers']} mixers"
        )

    def foretells(task: str, answer: str) -> bool:
        return answer == "foretells" and number(task, "rho", "high") < 0

    known = "attending taken out too"

    def unseen(task: str) -> str:
        if (new := f"{task}, new") not in {name for name, _ in found}:
            return ""
        line = found[new, "p"]
        also, so = ("", "") if foretells(new, line["answer"]) else ("but ", ", so that it does not hold for these")
        return (
            f"{also}of the {line['mixers']} mixers that it was not found with alone it is "
            f"{number(new, 'rho', 'value'):+.2f}, {p_text(number(new, 'p', 'value'))}{so}; "
        )

    beside = "".join(
        f" A score that was fixed later, for new seeds, does: `{task}` ({numbers(task)}); {unseen(task)}without "
        f"what follows from whether a mixer reads tokens of the past themselves or a state of them it is "
        f"{number(task, known, 'value'):+.2f}."
        for task, answer in later.items()
        if foretells(task, answer)
    )
    p = {task: number(task, "p", "value") for task in answers if (task, "p") in found}
    tested = [task for task in p if not answers[task].startswith("uninformative")]
    if not tested:
        why = "; ".join(f"`{task}`: {answer}" for task, answer in answers.items())
        return f"No task of minutes is known to foretell the loss out of domain ({why}).{beside}"
    surely = [task for task in tested if foretells(task, answers[task])]
    best = min(surely or tested, key=p.__getitem__)
    if surely:
        return f"The task of minutes that foretells the loss out of domain best is `{best}` ({numbers(best)}).{beside}"
    return (
        "No task of minutes that was fixed beforehand is shown to foretell the loss out of domain; the nearest is "
        f"`{best}` ({numbers(best)}).{beside}"
    )


# --------------------------------------------------------------------------------------------------------------- pieces
def _row(found: Records, model: str, reference: str) -> Row | None:
    rows = equal_loss.compare(found, reference) if reference in comparison.models(found) else ()
    return next((row for row in rows if row.model == model), None)


def _gap(row: Row | None) -> equal_loss.Measured | None:
    """Return the gap of the mean over domains, or of the only domain."""
    if row is None or row.gaps is None:
        return None
    return row.gaps[comparison.EQUAL] if comparison.EQUAL in row.gaps else next(iter(row.gaps.values()))


def _costs(plan: Plan, runs: Sequence[Run]) -> dict[str, Cost]:
    return {model: cost(run for run in runs if run.model == model) for model in (plan.model, *plan.references)}


def _number(gap: float, half_width: float | None) -> str:
    """Return the size of a gap with its interval, "0.31 ± 0.04"; three digits if it is small."""
    digits = 2 if abs(gap) >= 0.1 else 3
    return f"{abs(gap):.{digits}f}" + ("" if half_width is None else f" ± {half_width:.{digits}f}")


def _judgement(
    plan: Plan,
    runs: Sequence[Run],
    said: str,
    costs: Mapping[str, Cost],
    warnings: Sequence[str],
    rows: Mapping[str, Row | None],
) -> Judgement:
    verdicts, gaps, widths, over = {}, {}, {}, {}
    for name in plan.references:
        row = rows.get(name)
        gap = _gap(row)
        why = f" ({row.verdict.why})" if row is not None and row.verdict.why else ""
        verdicts[name] = f"{row.verdict.words}{why}" if row is not None else "cannot tell"
        gaps[name] = None if gap is None else gap.estimate.gap
        widths[name] = None if gap is None else gap.estimate.half_width
        over[name] = None if row is None else row.over_rates
    of_model = {model: next(run for run in runs if run.model == model) for model in costs}
    return Judgement(
        model=plan.model,
        sentence=said,
        foretold=foretold(),
        verdicts=verdicts,
        gaps=gaps,
        half_widths=widths,
        over_rates=over,
        tokens_per_s={model: found.tokens_per_s for model, found in costs.items()},
        peak_gib={model: found.peak_gib for model, found in costs.items()},
        state_bytes={
            model: state_bytes(run, on_cpu=costs[model].devices <= {"cpu"}) for model, run in of_model.items()
        },
        warnings=tuple(warnings),
        out=plan.out,
    )


def _warnings(
    plan: Plan, found: Records, rows: Mapping[str, Row | None], dropped: Mapping[str, str], tried: Collection[float]
) -> list[str]:
    """Return sentences on what the runs could not tell; `tried` are the mixer's rates, those of dropped runs too."""
    said = []
    if plan.config.size in SMOKE_TESTS:
        said.append(
            f"This is a smoke test at the size {plan.config.size}: it says that the mixer trains and roughly where it "
            "is, not what it costs at a useful size."
        )
    best = equal_loss.rates(found, plan.model).best
    if best in (min(tried), max(tried)):
        edge = "only" if len(tried) == 1 else "lowest" if best == min(tried) else "highest"
        said.append(
            f"The best learning rate of {plan.model}, {best * plan.unit:g}, is the {edge} one tried: a better one "
            "may lie beyond (--rates)."
        )
    said += [f"{label}: {why}." for label, why in dropped.items()]
    for name, row in rows.items():
        if row is None:
            continue
        gap = _gap(row)
        if row.gaps is None:
            why = equal_loss.untested(row)
            said.append(f"There is no gap to {IN_WORDS[name]} at equal loss: {why}.")
        elif row.seeds < equal_loss.SEEDS:
            n = equal_loss.NUMBERS.get(row.seeds, f"{row.seeds} seeds")
            said.append(f"The gap to {IN_WORDS[name]} has {n}, so that it has no interval and no verdict: --seeds=3.")
        elif gap is not None and abs(gap.gap) < equal_loss.SMALL and row.seeds < equal_loss.MORE_SEEDS:
            said.append(
                f"The gap to {IN_WORDS[name]} is below {equal_loss.SMALL:g} nats, which wants "
                f"{equal_loss.MORE_SEEDS} seeds: --seeds={equal_loss.MORE_SEEDS}."
            )
    said.append(
        f"Each reference ran at one learning rate, {_reference_rates(plan)}; the range over learning rates is that of "
        "the mixer."
    )
    return said


def _of_costs(plan: Plan, costs: Mapping[str, Cost]) -> list[str]:
    said = []
    measured = [found for found in costs.values() if found.tokens_per_s is not None]
    if len({found.devices for found in measured}) > 1 or any(len(found.devices) > 1 for found in measured):
        named = "; ".join(f"{model}: {', '.join(sorted(found.devices)) or DASH}" for model, found in costs.items())
        said.append(f"Runs on different devices do not compare in speed ({named}).")
    shared = [model for model, found in costs.items() if found.shared > 1 and found.devices <= {"cpu"}]
    if shared:
        said.append(
            f"Several runs at a time shared one CPU ({', '.join(shared)}), so that their speeds are lower than alone."
        )
    return said


def _head(judgement: Judgement) -> list[str]:
    return [f"# {judgement.model}\n", f"**{judgement.sentence}**\n"]


def _list(lines: Iterable[str]) -> str:
    return "".join(f"* {line}\n" for line in lines)


def _readings(plan: Plan, rows: Mapping[str, Row | None]) -> str:
    header = ["against", "verdict", "seeds", "gap", "over rates", "at equal tokens, outside", "in domain"]
    table = []
    for name, row in rows.items():
        if row is None:
            table.append([IN_WORDS[name], "cannot tell", *[DASH] * 5])
            continue
        gap = _gap(row)
        why = f" ({row.verdict.why})" if row.verdict.why else ""
        over = DASH if row.over_rates is None else "{:+.3f} to {:+.3f}".format(*row.over_rates)
        table.append(
            [
                IN_WORDS[name],
                f"{row.verdict.words}{why}",
                str(row.seeds),
                DASH if gap is None else cell(gap.estimate),
                over if row.n_pairs > 1 else "one rate",
                *(DASH if x is None else cell(x.estimate) for x in (row.outside, row.inside)),
            ]
        )
    return markdown(header, table, left=2)


def _cost_table(plan: Plan, judgement: Judgement, costs: Mapping[str, Cost]) -> str:
    """Return the table of training speed, memory and decoding state."""
    length = plan.config.train.seq_len
    header = ["model", "tokens/s", f"times {IN_WORDS[SAME_BLOCK]}", "peak memory", f"state at {length:,} tokens"]
    table = []
    for model, found in costs.items():
        ratio = speed_ratio(found, costs[SAME_BLOCK])
        state = judgement.state_bytes[model]
        half, full = state[length // 2], state[length]
        table.append(
            [
                model,
                DASH if found.tokens_per_s is None else f"{found.tokens_per_s:,.0f}",
                DASH if ratio is None else f"{ratio:.2f}",
                DASH if found.peak_gib is None else f"{found.peak_gib:.1f} GiB",
                size(full),
                f"{size(round((full - half) / (length - length // 2)))} per token" if full > half else "constant",
            ]
        )
    return (
        "Median training speed over the logged steps; the state that decoding keeps of one sequence, and how it grows "
        "from half the training length to all of it.\n\n" + markdown([*header, "growth"], table)
    )


def _scale(plan: Plan, runs: Sequence[Run], costs: Mapping[str, Cost]) -> str:
    train, config = plan.config.train, plan.config
    counts = {}
    for model in costs:
        run: Any = next(run for run in runs if run.model == model)
        counts[model] = flops.n_params(Model(run.config.model, max_len=train.seq_len))
    devices = sorted(set().union(*(found.devices for found in costs.values())))
    tokens = train.steps * train.batch_size * train.seq_len
    lines = [
        "Parameters: " + "; ".join(f"{model} {n:,}" for model, n in counts.items()) + ".",
        f"Tokens of a run: {tokens:,}, {train.steps:,} steps of {train.batch_size} sequences of {train.seq_len:,}.",
        f"Trained on {', '.join(plan.against)}; tested out of domain on {', '.join(plan.domains)}, at most "
        f"{config.eval.tokens:,} tokens each.",
        f"Learning rates of the mixer: {', '.join(sorted({_rate(run) for run in runs if run.model == plan.model}))}; "
        f"of the references: {_reference_rates(plan)}.",
        f"Device: {', '.join(devices) or DASH}.",
    ]
    return _list(lines)


def _reference_rates(plan: Plan) -> str:
    return ", ".join(f"{rate:g} for {IN_WORDS[model]}" for model, rate in plan.reference_rates.items())


def _rate(run: Run) -> str:
    return f"{run.config.optim.lr:g}" if run.config is not None else DASH


def _write(plan: Plan, sections: Iterable[str]) -> None:
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / FILE).write_text("\n".join(filter(None, sections)), encoding="utf-8")
