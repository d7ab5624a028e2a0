"""The tables of a study, as Markdown: the runs, the gaps to every reference, their interpretation, and the ranking."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from seqjax.study import comparison, equal_loss
from seqjax.study.comparison import Gap, Row
from seqjax.study.protocol import Record
from seqjax.study.records import Records
from seqjax.study.statistics import Estimate
from seqjax.training import origin

DASH = "-"
READINGS = (
    'What remains of the gap at the lowest common loss. "none": its interval includes zero. "closed": against end '
    "points with a decayed learning rate, or at the best rates, the interval includes zero or the sign changes, so it "
    'is no gap of the architecture. "stays": it does neither in what was tested. "not tested": the study has no run '
    'that could tell; it "changes sign" if its average over the range above has the other one.'
)
ONE_SEED = (
    ": an interval that excludes zero tells the two runs apart on other documents, not yet the two architectures."
)
RANKING = (
    "Models of one line cannot be told apart: each pair's own interval (95%, not corrected for the number of pairs) "
    "includes zero. A model may stand in several lines."
)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a table whose first `left` columns are aligned to the left, the others to the right."""
    rules = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rules, *rows)) + "\n"


def report(records: Records) -> str:
    """Return the content of gaps.md."""
    sections = [f"# {records.title}\n", _about(records), "## Runs\n", runs_table(records)]
    of_models = {model: comparison.by_rate(records, model) for model in comparison.models(records)}
    of_model = {model: found for model, found in of_models.items() if len(found) > 1}
    if of_model:
        sections += ["## Learning rates\n", _rates(of_model)]
    sections += ["## Cost\n", _cost(records)]
    if any(run.metadata.get("entropy") for run in records.runs):
        sections += ["## Entropy of attention\n", entropy_table(records)]
    known = comparison.models(records)
    for reference in records.references:
        sections.append(f"## Gaps to {reference}\n")
        if reference not in known or not comparison.common_runs(records, reference):
            sections.append("It has no results yet, so there is nothing to compare with.\n")
            continue
        sections.append(_gaps(records, reference))
    return "\n".join(sections)


def _about(records: Records) -> str:
    quantities = comparison.quantities(records)
    n_seeds = {len({r.seed for r in comparison.common_runs(records, model)}) for model in comparison.models(records)}
    several = max(n_seeds, default=0) > 1
    text = [
        f"Gaps are differences of loss in {records.unit.name}, positive where a model is worse than the reference at "
        f"the same {comparison.x_label(records)} (below: loss in domain). Losses between evaluations are interpolated "
        "linearly, none is extrapolated, and every pair is compared over the losses that both passed through. The "
        "method: docs/protocol.md."
    ]
    if comparison.NATURAL in quantities:
        shares = zip(records.domains, quantities[comparison.NATURAL], strict=True)
        text.append(
            f'"{comparison.NATURAL}" weighs the domains by their size in the corpus '
            f"({', '.join(f'{domain} {share:.3f}' for domain, share in shares)})."
        )
    if records.blocks is None:
        text.append("The losses of single blocks are not known here, so there are no intervals.")
    else:
        what = "of documents and seeds" if several else "of documents alone, because there is one seed"
        text.append(f"± is half the width of the 95% interval {what}.")
    if not several:
        text.append(
            "One seed cannot tell how far another initialisation or another order of the data would move a gap"
            + ("." if records.blocks is None else ONE_SEED)
        )
    text = ["\n".join([*text, ""])]
    return "\n".join([*text, *filter(None, [remarks(records)])])


def remarks(records: Records) -> str:
    """Return lines that name the runs without results, and those that began with weights or were extended; or ""."""
    named = "; ".join(f"{label} ({why})" for label, why in records.missing.items())
    lines = [f"**Missing:** {named}.\n"] if named else []
    for run in records.runs:
        lines += [f"**{run.label}** {line}.\n" for line in origin.lines(run.metadata)]
    return "\n".join(lines)


def runs_table(records: Records) -> str:
    """Return the last losses of every run and its speed."""
    header = ["run", "tokens/s", "tokens", "loss in domain", *records.domains]
    rows = []
    for run in records.runs:
        last = run.points[-1]
        speed = run.metadata.get("tokens_per_s")
        rows.append(
            [
                run.label,
                _speed(speed),
                f"{last.tokens / 1e6:.1f}M" if last.tokens >= 1e5 else str(last.tokens),
                f"{run.losses_in_domain(records.against)[-1]:.3f}",
                *(f"{last.domains[domain]:.3f}" for domain in records.domains),
            ]
        )
    return "Losses of the last evaluation, tokens/s as logged.\n\n" + markdown(header, rows)


def _rates(of_model: Mapping[str, Mapping[float, tuple[float, float]]]) -> str:
    """Return the losses at each learning rate, and the models whose best rate is at the edge of the grid."""
    rates = sorted({rate for found in of_model.values() for rate in found})
    rows: list[list[str]] = []
    at_edge: dict[str, list[str]] = {"lowest": [], "highest": []}
    for model, found in of_model.items():
        best = min(found, key=lambda rate: found[rate][0])
        cells = {rate: f"{inside:.3f}, {outside:.3f}" for rate, (inside, outside) in found.items()}
        cells[best] = f"**{cells[best]}**"
        rows.append([model, *(cells.get(rate, DASH) for rate in rates)])
        for edge, rate in (("lowest", min(found)), ("highest", max(found))):
            if best == rate:
                at_edge[edge].append(model)
    text = (
        "Loss in domain and mean loss outside (each domain the same) at the end of the runs, by learning rate as a "
        "multiple of the common one; in bold each model's best by the loss in domain.\n\n"
        + markdown(["model", *(f"x{rate:g}" for rate in rates)], rows)
    )
    for edge, found_there in at_edge.items():
        if found_there:
            text += f"\nBest at the {edge} rate tried, so that one beyond may suit better: {'; '.join(found_there)}.\n"
    return text


def _cost(records: Records) -> str:
    """Return the cost of each model, beside its gap to every reference."""
    known = [name for name in records.references if comparison.common_runs(records, name)]
    gaps = {name: equal_loss.estimates(records, name) for name in known}
    runs = {model: comparison.common_runs(records, model) for model in comparison.models(records)}
    return cost_table(records, runs, gaps, at="at the lowest common loss")


def cost_table(
    records: Records, runs: Mapping[str, Sequence[Record]], gaps: Mapping[str, Mapping[str, Estimate]], *, at: str
) -> str:
    """Return the cost of each model's runs, beside its gaps: reference -> model -> gap; `at` names their loss."""
    rows = []
    for model, of_model in runs.items():
        if not of_model:
            continue
        metadata = of_model[0].metadata  # with what all seeds share: parameters, FLOPs, state
        speeds, peaks = (
            [run.metadata[key] for run in of_model if run.metadata.get(key) is not None]
            for key in ("tokens_per_s", "device_peak_gib")
        )
        given = [speeds.get(model) for speeds in records.speeds.values()]
        rows.append(
            [
                model,
                _speed(statistics.median(speeds) if speeds else None),
                *map(_speed, given),
                _number(max(peaks, default=None), 1, " GiB"),
                _number(metadata.get("state_bytes"), 2**20, " MiB"),
                _number(metadata.get("flops_per_token"), 1e9, "", digits=2),
                *(cell(to_one[model]) if model in to_one else DASH for to_one in gaps.values()),
            ]
        )
    header = ["model", "tokens/s", *records.speeds, "memory", "state", "GFLOPs/token", *(f"gap to {r}" for r in gaps)]
    return (
        "Training speed (median of the runs) and peak memory of the device (highest) as the runs logged them; the "
        "state that decoding keeps of one sequence of the training length; FLOPs of a training step; the gap of "
        f"{comparison.main_quantity(records)} {at}.\n\n{markdown(header, rows)}"
    )


def entropy_table(records: Records) -> str:
    """Return the entropy that runs measured at their end, with the share of the largest that is possible."""
    domains = (*records.against, *records.domains)
    rows = []
    for run in records.runs:
        if found := run.metadata.get("entropy"):
            cells = (found.get(domain, {}) for domain in domains)
            rows.append([run.label, *(_entropy(cell) for cell in cells)])
    return (
        "At the end of the runs that measured it, in nats; in brackets as a share of ln(i + 1), which equal weights "
        "have.\n\n" + markdown(["run", *domains], rows)
    )


def _entropy(measured: Mapping[str, float]) -> str:
    return f"{measured['entropy']:.3f} ({measured['entropy_relative']:.3f})" if measured else DASH


def _speed(speed: float | None) -> str:
    return DASH if speed is None else f"{speed / 1000:,.0f}k" if speed >= 10_000 else f"{speed:,.0f}"


def _number(value: float | None, unit: float, name: str, *, digits: int = 1) -> str:
    if value is None:
        return DASH
    shown = f"{value / unit:,.{digits}f}"
    return f"{value / unit:.1g}{name}" if value and not float(shown.replace(",", "")) else f"{shown}{name}"


def _gaps(records: Records, reference: str) -> str:
    rows = comparison.compare(records, reference)
    several = _has_seeds(rows)
    sections = [
        "At the lowest loss in domain that both reached:\n",
        gap_table(records, reference),
        f"Averaged over the lowest {records.unit.range} {records.unit.name.split()[0]} of loss in domain that both "
        "passed through:\n",
        _table(records, rows, [row.over_range for row in rows], seeds=several),
    ]
    if any(row.end_points for row in rows):
        sections += [
            f"End points against the line through the end points of the schedules of {reference}, all with a decayed "
            "learning rate; - where the loss in domain is outside those end points:\n",
            _table(records, rows, [row.end_points for row in rows], seeds=several),
        ]
    if any(row.best_rate for row in rows):
        rates = "; ".join(f"{r.model} x{r.rates[0]:g}, {reference} x{r.rates[1]:g}" for r in rows if r.rates)
        sections += [
            "Each at its best learning rate by the loss in domain at the end, as a multiple of the common one "
            f"({rates}):\n",
            _table(records, rows, [row.best_rate for row in rows], seeds=several),
        ]
    if records.blocks is not None:
        sections.append(_readings(records, rows))
    sections.append(_ranking(records, reference, rows, several=several))
    return "\n".join(sections)


def gap_table(records: Records, reference: str) -> str:
    """Return the table of the gaps of all models to a reference, at the lowest loss in domain that both reached.

    Raises `UserError` if the study has no model of that name.
    """
    comparison.require_model(records, reference)
    rows = comparison.compare(records, reference)
    return _table(records, rows, [row.lowest for row in rows], seeds=_has_seeds(rows))


def _has_seeds(rows: Sequence[Row]) -> bool:
    return any(row.lowest is not None and row.lowest.seeds > 1 for row in rows)


def _table(records: Records, rows: Sequence[Row], gaps: Sequence[Gap | None], *, seeds: bool) -> str:
    names = list(comparison.quantities(records))
    cells = []
    for row, gap in zip(rows, gaps, strict=True):
        if gap is None:
            cells.append([row.model, *[DASH] * (1 + seeds + len(names))])
            continue
        at = f"{gap.low:.3f}" if gap.low == gap.high else f"{gap.low:.3f} to {gap.high:.3f}"
        of_seeds = [str(gap.seeds)] if seeds else []
        cells.append([row.model, *of_seeds, at, *(cell(gap.estimates[name]) for name in names)])
    return markdown(["model", *(["seeds"] if seeds else []), "loss in domain", *names], cells)


def cell(estimate: Estimate) -> str:
    """Return a gap with half the width of its interval, if it has one."""
    width = "" if estimate.half_width is None else f" ± {estimate.half_width:.3f}"
    return f"{estimate.gap:+.3f}{width}"


def _readings(records: Records, rows: Sequence[Row]) -> str:
    names = list(comparison.quantities(records))
    lines = []
    for row in rows:
        tested = ", ".join(comparison.causes(row)) or DASH
        lines.append([row.model, tested, *(comparison.reading(row, name) for name in names)])
    table = markdown(["model", "tested", *names], lines, left=2 + len(names))
    return f"{READINGS}\n\n{table}"


def _ranking(records: Records, reference: str, rows: Sequence[Row], *, several: bool) -> str:
    if not several:
        return "**Ranking:** none, because there is one seed.\n"
    main = comparison.main_quantity(records)
    lines = [f"**Ranking** by {main}, best first; {reference} has gap zero. {RANKING}\n"]
    groups = comparison.ranking(records, reference, rows)
    lines += [f"{i}. {', '.join(group)}" for i, group in enumerate(groups, 1)]
    alone = [row.model for row in rows if row.lowest is None or row.lowest.seeds < 2]
    lines += [f"\nNot ranked, for want of a second seed or of a common loss: {', '.join(alone)}."] if alone else []
    return "\n".join(lines) + "\n"
