"""Write a judgement's result: one sentence, leaderboard rows and costs; the page is DIR/judge.md."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from seqjax.escape import markdown as escaped
from seqjax.study import gaps
from seqjax.study.gaps import classes, heights
from seqjax.study.gaps.rows import Row
from seqjax.study.gaps.verdicts import COSTS, GAINS, LIMIT, UNDECIDED
from seqjax.study.judge import costs
from seqjax.study.judge.costs import Cost
from seqjax.study.judge.joined import UNIT, rounded
from seqjax.study.judge.matching import parameters
from seqjax.study.judge.plan import IN_WORDS, SAME_BLOCK, Plan, Runs
from seqjax.study.report.tables import DASH, SIZE, cell, markdown
from seqjax.study.report.words import verdict
from seqjax.study.runs import files
from seqjax.study.runs.record import Records
from seqjax.study.runs.runner import Run
from seqjax.terminal import size

FILE = "judge.md"
SMOKE_TESTS = ("demo", "debug")  # sizes


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Hold the result of judging a mixer against two references.

    The references are attention as published and attention with the same block.

    Args:
        model: Name of the mixer's model.
        sentence: The answer: the verdict against attention with the same block, and the speed.
        rows: Comparison with each reference that has results (`seqjax.study.gaps.Row`).
        costs: Costs of the mixer and each reference.
        parameters: Parameter counts of the mixer and each reference.
        width: MLP width that gives the mixer's model the parameter count of attention (--match=params); None if its
            config keeps its width.
        remarks: Sentences about limits of the runs, and how to lift these limits.
        out: Directory with the page and the study's files.
    """

    model: str
    sentence: str
    rows: dict[str, Row]
    costs: dict[str, Cost]
    parameters: dict[str, int]
    width: int | None
    remarks: tuple[str, ...]
    out: Path


def head(plan: Plan) -> list[str]:
    """Return the first printed lines."""
    smoke = [smoke_test(plan)] if plan.config.size in SMOKE_TESTS else []
    return [*smoke, *([plan.match.text] if plan.match else []), *(f"* {remark}" for remark in plan.remarks)]


def smoke_test(plan: Plan) -> str:
    """Return the first line for a size too small to judge a mixer."""
    return (
        f"This is a smoke test at the size {plan.config.size}: it shows that the mixer trains and decodes, not what it "
        "costs at a useful size."
    )


# ------------------------------------------------------------------------------------------------------------- the page
def write(
    plan: Plan,
    runs: Runs,
    *,
    missing: Mapping[str, str],
    tried: Sequence[float],
    losses: Mapping[str, Mapping[float, float]],
) -> Judgement:
    """Write the page from the files in `plan.out`, and return its content.

    Args:
        plan: The plan.
        runs: The study file's runs.
        missing: Label -> reason, for runs without results.
        tried: The mixer's learning rates.
        losses: Model -> learning rate -> last in-domain loss.
    """
    records = files.read(plan.out)
    rows = {name: row for name in plan.references if (row := _row(records, plan, name)) is not None}
    model_costs = costs.by_model(plan, runs.runs())
    remarks = [
        *plan.remarks,
        *records.remarks,
        *(f"{label}: {why}." for label, why in missing.items() if label.startswith(f"{plan.model}, ")),
        *_dropped(plan, runs),
        *_remedies(plan, rows, tried, losses),
        *costs.remarks(model_costs),
    ]
    answer = sentence(plan, rows.get(SAME_BLOCK), model_costs, tried=tried)
    judgement = _judgement(plan, answer, rows, model_costs, remarks)
    sections = [
        *_head(plan, judgement),
        "## Base capabilities\n",
        _readings(rows),
        *(f"**Against {IN_WORDS[name]}** ({name}). {escaped(verdict(records, plan.model, name))}\n" for name in rows),
        "A gap is in nats per token OOD at the same in-domain loss, positive where the mixer is worse "
        "(docs/protocol.md). All columns are in [leaderboard.csv](leaderboard.csv).\n",
        "![gaps at equal in-domain loss](gaps.png)\n" if (plan.out / "gaps.png").is_file() else "",
        *_foot(plan, judgement, tried),
    ]
    _write(plan, sections)
    return judgement


def write_diverged(plan: Plan, runs: Sequence[Run], tried: Sequence[float]) -> Judgement:
    """Write the page for a mixer that diverged at every learning rate.

    Returns its content.
    """
    model_costs = costs.by_model(plan, runs)
    rates = ", ".join(f"{rate:g}" for rate in sorted(tried))
    answer = f"{plan.model} diverged at every learning rate ({rates}), so its cost is unknown"
    answer += f"{_speed(plan, model_costs)}."
    remarks = [
        *plan.remarks,
        "It may train at lower learning rates (--rates) or with a longer warmup.",
        *costs.remarks(model_costs),
    ]
    judgement = _judgement(plan, answer, {}, model_costs, remarks)
    _write(plan, [*_head(plan, judgement), *_foot(plan, judgement, tried)])
    return judgement


def sentence(plan: Plan, row: Row | None, model_costs: Mapping[str, Cost], *, tried: Sequence[float] = ()) -> str:
    """Return the judgement in one sentence.

    `row` is the comparison with attention with the same block.
    """
    name, against = plan.model, IN_WORDS[SAME_BLOCK]
    if row is None or row.verdict.word == UNDECIDED:
        needs = f" (needs: {row.verdict.needs})" if row is not None and row.verdict.needs else ""
        text = f"Whether {name} costs base capabilities against {against} is undecided{needs}"
    else:
        words = {COSTS: "costs base capabilities", GAINS: "gains base capabilities"}
        text = f"{name} {words.get(row.verdict.word, f'has {row.verdict.word}')} against {against}"
    if row is not None:
        if row.gap is not None:
            text += f": {row.gap.text()} nats per token OOD at equal in-domain loss"
        elif row.why:
            text += f": {row.why}"
        text += _marks(row, tried) + _size(row) + _inside(row)
    return f"{text}{_speed(plan, model_costs)}."


def _marks(row: Row, tried: Sequence[float]) -> str:
    """Return the verdict's marks: one seed, trend, next learning rate to try."""
    marks = ["one seed"] if row.gap is not None and row.seeds == 1 else []
    marks += [f"{row.trend} with tokens"] if row.trend else []
    if rates := _next_rates(row, tried):
        marks.append(f"provisional: try {_rates_text(rates)}")
    return f" ({', '.join(marks)})" if marks else ""


def _next_rates(row: Row, tried: Sequence[float]) -> dict[str, float]:
    """Return the untried next learning rates, by side."""
    rates = {side: rounded(multiple * UNIT) for side, multiple in row.next_rates.items()}
    return {side: rate for side, rate in rates.items() if rate not in tried}


def _rates_text(rates: Mapping[str, float]) -> str:
    if len(set(rates.values())) == 1:
        return f"the learning rate {next(iter(rates.values())):g}"
    return "the learning rate " + ", ".join(
        f"{rate:g} of {'the mixer' if side == 'model' else 'attention'}" for side, rate in rates.items()
    )


def _size(row: Row) -> str:
    if row.size is None or abs(row.size - 1) <= SIZE:
        return ""
    return f"; it has {abs(row.size - 1):.0%} {'more' if row.size > 1 else 'fewer'} parameters"


def _inside(row: Row) -> str:
    """Return a clause on the in-domain difference at equal tokens, if it is large.

    The clause matters because a mixer that learns less may have no gap.
    """
    gap = 0.0 if row.at_equal_tokens is None else row.at_equal_tokens.inside.value
    if abs(gap) <= LIMIT:
        return ""
    return f"; at equal tokens its in-domain loss is {abs(gap):.2f} {'higher' if gap > 0 else 'lower'}"


def _speed(plan: Plan, model_costs: Mapping[str, Cost]) -> str:
    """Return the sentence's end about training speed; "" if speeds do not compare."""
    ratio = costs.speed_ratio(model_costs[plan.model], model_costs[SAME_BLOCK])
    if ratio is None:
        return ""
    return f"; on sequences of {plan.config.train.seq_len:,} tokens it trains {ratio:.2f} times as fast"


# --------------------------------------------------------------------------------------------------------------- pieces
def _row(records: Records, plan: Plan, reference: str) -> Row | None:
    if not {plan.model, reference} <= set(records.models):
        return None
    rows = gaps.with_copies(gaps.compare(records, reference), records, classes.read(plan.out))
    return next(row for row in rows if row.model == plan.model)


def _judgement(
    plan: Plan, answer: str, rows: dict[str, Row], model_costs: dict[str, Cost], remarks: Sequence[str]
) -> Judgement:
    return Judgement(
        model=plan.model,
        sentence=answer,
        rows=rows,
        costs=model_costs,
        parameters={name: parameters(config) for name, config in plan.configs.items()},
        width=None if plan.match is None else plan.match.width,
        remarks=tuple(dict.fromkeys(remarks)),
        out=plan.out,
    )


def _dropped(plan: Plan, runs: Runs) -> list[str]:
    """Return sentences about the mixer's learning rates that were stopped early."""
    steps = plan.config.train.steps
    return [
        f"{run.label}: stopped after {run.ends[-1] / steps:.0%} of its tokens, far worse than another learning rate."
        for run in runs.runs()
        if run.model == plan.model and run.ends[-1] < steps
    ]


def _remedies(
    plan: Plan, rows: Mapping[str, Row], tried: Sequence[float], losses: Mapping[str, Mapping[float, float]]
) -> list[str]:
    """Return sentences that suggest learning rates to try in the same directory."""
    suggested = {rate for row in rows.values() for rate in _next_rates(row, tried).values()}
    sentences = []
    row = rows.get(SAME_BLOCK)
    if row is not None and row.verdict.needs == heights.NO_RATE:
        best = [min(losses[name], key=losses[name].__getitem__) for name in (plan.model, SAME_BLOCK)]
        middle = float(f"{(best[0] * best[1]) ** 0.5:.2g}")
        sentences.append(
            f"The best learning rates of {plan.model} and {IN_WORDS[SAME_BLOCK]} are {best[0]:g} and {best[1]:g}, and "
            "no rate is near-best for both."
        )
        suggested |= {middle} - {*tried}
    if suggested:
        rates = ",".join(f"{rate:g}" for rate in sorted({*tried, *suggested}))
        sentences.append(
            f"The best learning rate may not have been tried yet: --rates={rates} with the same --out tries more rates."
        )
    return sentences


def _head(plan: Plan, judgement: Judgement) -> list[str]:
    smoke = [f"{smoke_test(plan)}\n"] if plan.config.size in SMOKE_TESTS else []
    return [*smoke, f"# {escaped(judgement.model)}\n", f"**{escaped(judgement.sentence)}**\n"]


def _foot(plan: Plan, judgement: Judgement, tried: Sequence[float]) -> list[str]:
    return [
        "## Speed, memory and decoding state\n",
        _cost_table(plan, judgement),
        *(("## Limits of these runs\n", _list(judgement.remarks)) if judgement.remarks else ()),
        "## Scale\n",
        _scale(plan, judgement, tried),
    ]


def _list(lines: Iterable[str]) -> str:
    return "".join(f"* {escaped(line)}\n" for line in lines)


def _readings(rows: Mapping[str, Row]) -> str:
    header = ["against", "verdict", "gap", "as tuned", "seeds", "per doubling of tokens"]
    table = []
    for name, row in rows.items():
        difference = row.at_equal_tokens
        table.append(
            [
                IN_WORDS[name],
                row.text,
                DASH if row.gap is None else cell(row.gap),
                DASH if row.as_tuned is None else f"{row.as_tuned:+.3f}",
                f"{row.seeds} and {row.reference_seeds}",
                DASH if row.per_doubling is None else cell(row.per_doubling),
                *(DASH if difference is None else cell(x) for x in (difference or (None, None))),
            ]
        )
    return markdown([*header, "at equal tokens, in domain", "OOD"], table, left=2)


def _cost_table(plan: Plan, judgement: Judgement) -> str:
    """Return the table with training speed, memory and decoding state."""
    length = plan.config.train.seq_len
    header = ["model", "tokens/s", f"times {IN_WORDS[SAME_BLOCK]}", "peak memory", f"state at {length:,} tokens"]
    table = []
    for model, cost in judgement.costs.items():
        ratio = costs.speed_ratio(cost, judgement.costs[SAME_BLOCK])
        half, full = cost.state_bytes[length // 2], cost.state_bytes[length]
        table.append(
            [
                escaped(model),
                DASH if cost.tokens_per_s is None else f"{cost.tokens_per_s:,.0f}",
                DASH if ratio is None else f"{ratio:.2f}",
                DASH if cost.peak_gib is None else f"{cost.peak_gib:.1f} GiB",
                size(full),
                f"{size(round((full - half) / (length - length // 2)))} per token" if full > half else "constant",
            ]
        )
    return (
        "Median training speed over the logged steps; decoding state for one sequence, and its growth from half the "
        "training length to the full length.\n\n" + markdown([*header, "growth"], table)
    )


def _scale(plan: Plan, judgement: Judgement, tried: Sequence[float]) -> str:
    train, config = plan.config.train, plan.config
    devices = sorted(set().union(*(cost.devices for cost in judgement.costs.values())))
    tokens = train.steps * train.batch_size * train.seq_len
    lines = [
        "Parameters: " + "; ".join(f"{model} {n:,}" for model, n in judgement.parameters.items()) + ".",
        *([plan.match.text] if plan.match else []),
        f"Tokens per run: {tokens:,} ({train.steps:,} steps with {train.batch_size} sequences of {train.seq_len:,}).",
        f"Training domains: {', '.join(plan.against)}; OOD test domains: {', '.join(plan.domains)}, at most "
        f"{config.eval.tokens:,} tokens each.",
        f"Learning rates: {', '.join(f'{rate:g}' for rate in sorted(tried))}.",
        *(f"Joined: {len(runs)} runs of {directory}." for directory, runs in plan.joined.by_directory.items()),
        f"Device: {', '.join(devices) or DASH}.",
    ]
    return _list(lines)


def _write(plan: Plan, sections: Iterable[str]) -> None:
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / FILE).write_text("\n".join(filter(None, sections)), encoding="utf-8")
