"""Write leaderboard.md and classes.md: a study's tables in Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from seqjax.escape import markdown as escaped
from seqjax.study import gaps
from seqjax.study.gaps import Row, classes
from seqjax.study.gaps.classes import ClassPart
from seqjax.study.gaps.statistics import Estimate
from seqjax.study.report import leaderboard
from seqjax.study.report.leaderboard import Compared
from seqjax.study.runs.record import Records, in_domain
from seqjax.training import origin
from seqjax.training.token_classes import ClassSums

DASH = "-"
SIZE = 0.03  # a larger relative parameter difference is marked
COLUMNS = (
    "**Columns.** Gap: OOD loss minus the reference's at equal in-domain loss and matched learning rates; positive is "
    "worse. ± is half the width of the 95% interval, from two seeds on. As tuned: the same with each side at its own "
    "rates. Verdict: tested on the less favourable of both readings, for all models together; \\* is provisional, "
    "because the best rate of either side is at the edge of its grid or the only one. Per doubling: change of the gap "
    "per doubling of training tokens. Equal tokens: differences of the last losses. Copies: share of the OOD "
    "difference at equal tokens from tokens that continue an earlier bigram."
)
FAMILIES = {
    "repeat": "Does a token continue what followed its bigram the last time in the block?",
    "distance": "How many tokens back that was, for the tokens that continue as before.",
    "frequency": "How often the token occurs in training, per million tokens.",
    "position": "Where in the block: the number of tokens before the last one read.",
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Return a table with the first `left` columns aligned to the left.

    The other columns are aligned to the right. Cells are Markdown; text from users and files must be escaped
    (`seqjax.escape.markdown`).
    """
    rules = ["---"] * left + ["---:"] * (len(header) - left)
    lines = (header, rules, *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def cell(estimate: Estimate | None) -> str:
    """Return a signed value, with half its interval's width if it has an interval."""
    return DASH if estimate is None else estimate.text()


def report(records: Records, compared: Compared) -> str:
    """Return the content of leaderboard.md."""
    sections = [f"# {escaped(records.title)}\n", _about(records), f"{COLUMNS}\n"]
    for reference in records.references:
        sections.append(f"## Gaps to {escaped(reference)}\n")
        if reference in compared:
            sections.append(_comparison(records, compared[reference]))
        else:
            sections.append("It has no results yet, so there is nothing to compare with.\n")
    sections += ["## Learning rates\n", _rates(records), "## Runs\n", _runs(records), "## Cost\n"]
    sections.append(_cost(records, compared))
    if any(run.metadata.get("entropy") for run in records.runs):
        sections += ["## Entropy of attention\n", _entropies(records)]
    return "\n".join(sections)


def _about(records: Records) -> str:
    text = (
        f"Losses are in {records.unit.name}; the in-domain loss is the {escaped(records.in_domain_name)}. Gaps are "
        f"means over the OOD domains {escaped(', '.join(records.domains))}. The method: docs/protocol.md."
    )
    if records.blocks is None:
        text += " Losses of single blocks are not known here, so intervals do not cover the evaluated text."
    return f"{text}\n{remarks(records)}"


def remarks(records: Records) -> str:
    """Return lines on missing runs, comparison limits, and warm-started runs."""
    named = "; ".join(f"{label} ({why})" for label, why in records.missing.items())
    lines = [f"**Missing:** {escaped(named)}."] if named else []
    lines += [f"**Note:** {escaped(remark)}" for remark in records.remarks]
    lines += [
        f"**{escaped(run.label)}** {escaped(line)}." for run in records.runs for line in origin.lines(run.metadata)
    ]
    return "".join(f"\n{line}\n" for line in lines)


# --------------------------------------------------------------------------------------------------------------- gaps
def gap_table(records: Records, rows: Sequence[Row]) -> str:
    """Return a comparison table, one line per row.

    Without any gap, it has only differences at equal tokens.
    """
    columns: dict[str, list[str]] = {
        "model": [_model(row) for row in rows],
        "parameters (M)": [_number(row.parameters, 1e6, "") for row in rows],
        "seeds": [str(row.seeds) for row in rows],
        "learning rates": [", ".join(map(records.rate_text, row.rates)) for row in rows],
    }
    if any(row.gap is not None for row in rows):
        columns |= {
            "gap": [cell(row.gap) for row in rows],
            "as tuned": [DASH if row.as_tuned is None else f"{row.as_tuned:+.3f}" for row in rows],
            "verdict": [row.text.replace("*", "\\*") for row in rows],
            "per doubling": [cell(row.per_doubling) for row in rows],
        }
    columns |= {
        "OOD, equal tokens": [cell(row.at_equal_tokens and row.at_equal_tokens.outside) for row in rows],
        "in-domain, equal tokens": [cell(row.at_equal_tokens and row.at_equal_tokens.inside) for row in rows],
        "copies": [DASH if row.copy is None else f"{row.copy:.0%}" for row in rows],
        "speed-up": [_speed_up(row) for row in rows],
    }
    for optional in ("copies", "speed-up"):
        if set(columns[optional]) == {DASH}:
            del columns[optional]
    return markdown(list(columns), zip(*columns.values(), strict=True))


def _model(row: Row) -> str:
    """Return the model's name as Markdown, with a parameter difference above `SIZE`."""
    is_marked = row.size is not None and abs(row.size - 1) > SIZE
    name = escaped(row.model)
    return f"{name} ({row.size - 1:+.1%} parameters)" if is_marked and row.size else name


def _speed_up(row: Row) -> str:
    if row.speed_up is None:
        return DASH
    speed = row.speed_up
    text = f"{speed.bound} {speed.value:.2f}".strip()
    return text if speed.bound or speed.low is None else f"{text} ({speed.low:.2f} to {speed.high:.2f})"


def _comparison(records: Records, rows: Sequence[Row]) -> str:
    sections = [gap_table(records, rows)]
    for why in dict.fromkeys(row.why for row in rows if row.why):
        models = [escaped(row.model) for row in rows if row.why == why]
        sections.append(
            f"No gap for {'all models' if len(models) == len(rows) else '; '.join(models)}: {escaped(why)}.\n"
        )
    if conditions := dict.fromkeys(row.speed_up.condition for row in rows if row.speed_up is not None):
        sections.append(
            "Speed-up: the reference's training time over the model's, to the higher of both last OOD losses "
            f"({escaped('; '.join(conditions))}).\n"
        )
    known = [row for row in rows if row.gap is not None]
    if known and len(records.quantities) > 1:
        lines = [[escaped(row.model), *(cell(row.gaps[name]) for name in records.quantities)] for row in known]
        sections += ["The gap of each domain:\n", markdown(["model", *map(escaped, records.quantities)], lines)]
    return "\n".join(sections)


# ------------------------------------------------------------------------------------------ learning rates, runs, cost
def _rates(records: Records) -> str:
    """Return each rate's losses, the best rate's grid edge, and the next rate."""
    by_model = {model: gaps.rates(records, model) for model in records.models}
    tried = sorted({rate for model_rates in by_model.values() for rate in model_rates.by_rate})
    preferred = next((by_model[name].best for name in records.references if name in by_model), None)
    rows = []
    for model, model_rates in by_model.items():
        cells = {}
        for rate, (seeds, inside, outside) in model_rates.by_rate.items():
            text = f"{inside:.3f}, {outside:.3f} ({seeds})" + ("\\*" if rate in model_rates.near else "")
            cells[rate] = f"**{text}**" if rate == model_rates.best else text
        next_rate = model_rates.next_rate(preferred)
        following = DASH if next_rate is None else records.rate_text(next_rate)
        rows.append([escaped(model), *(cells.get(rate, DASH) for rate in tried), model_rates.edge or DASH, following])
    return (
        "Last in-domain loss and last mean OOD loss, with the number of seeds in brackets. Bold: best in domain. "
        "\\*: near-best, which gaps use. Edge: where the best rate lies in the model's grid.\n\n"
        + markdown(["model", *map(records.rate_text, tried), "edge", "next rate"], rows)
    )


def _runs(records: Records) -> str:
    """Return every run's last losses and speed."""
    rows = []
    for run in records.runs:
        last = run.last
        inside = in_domain([last], records.against)[0]
        tokens = f"{last.tokens / 1e6:.1f}M" if last.tokens >= 1e5 else str(last.tokens)
        losses = (f"{last.domains[domain]:.3f}" for domain in records.domains)
        rows.append([escaped(run.label), _speed(run.metadata.get("tokens_per_s")), tokens, f"{inside:.3f}", *losses])
    header = ["run", "tokens/s", "tokens", "in-domain loss", *map(escaped, records.domains)]
    return "Losses at the last end; tokens/s as logged.\n\n" + markdown(header, rows)


def _cost(records: Records, compared: Compared) -> str:
    """Return each model's cost, next to its gaps."""
    values = {name: leaderboard.shown(rows) for name, rows in compared.items()}
    rows = []
    for model in records.models:
        runs = gaps.shown_runs(records, model)
        metadata = runs[0].metadata  # all seeds have the same parameters, FLOPs and state
        speeds, peaks = (
            [run.metadata[key] for run in runs if run.metadata.get(key) is not None]
            for key in ("tokens_per_s", "device_peak_gib")
        )
        rows.append(
            [
                escaped(model),
                _speed(statistics.median(speeds) if speeds else None),
                *(_speed(column.get(model)) for column in records.speeds.values()),
                _number(max(peaks, default=None), 1, " GiB"),
                _number(metadata.get("state_bytes"), 2**20, " MiB"),
                _number(metadata.get("flops_per_token"), 1e9, "", digits=2),
                *(cell(column.get(model)) for column in values.values()),
            ]
        )
    names = [escaped(leaderboard.shown_name(rows, name)) for name, rows in compared.items()]
    header = ["model", "tokens/s", *map(escaped, records.speeds), "memory", "state", "GFLOPs/token", *names]
    return (
        "Logged training speed (median of the runs) and peak device memory (maximum); decoding state of one sequence "
        f"of the training length; FLOPs of a training step.\n\n{markdown(header, rows)}"
    )


def _entropies(records: Records) -> str:
    """Return the attention entropy from the last evaluation.

    The value in brackets is relative to the maximum.
    """
    domains = (*records.against, *records.domains)
    rows = []
    for run in records.runs:
        if entropy := run.metadata.get("entropy"):
            rows.append([escaped(run.label), *(_entropy(entropy.get(domain)) for domain in domains)])
    return (
        "At the end of the runs that measured it, in nats; in brackets as a share of ln(i + 1), the entropy of equal "
        "weights.\n\n" + markdown(["run", *map(escaped, domains)], rows)
    )


def _entropy(measured: Mapping[str, float] | None) -> str:
    return f"{measured['entropy']:.3f} ({measured['entropy_relative']:.3f})" if measured else DASH


def _speed(speed: float | None) -> str:
    return DASH if speed is None else f"{speed / 1000:,.0f}k" if speed >= 10_000 else f"{speed:,.0f}"


def _number(value: float | None, unit: float, name: str, *, digits: int = 1) -> str:
    if value is None:
        return DASH
    shown = f"{value / unit:,.{digits}f}"
    return f"{value / unit:.1g}{name}" if value and not float(shown.replace(",", "")) else f"{shown}{name}"


# -------------------------------------------------------------------------------------------------- classes of tokens
def class_section(records: Records, sums: Mapping[str, ClassSums], reference: str) -> str:
    """Return the section on token-class differences to a reference.

    It is "" if no model and the reference both have sums. Raises `UserError` if the study has no model with that name.
    """
    gaps.require_model(records, reference)
    records = gaps.comparable(records, reference)
    sides = {
        model: [sums[run.label] for run in gaps.shown_runs(records, model) if run.label in sums]
        for model in records.models
    }
    reference_sums = sides.pop(reference)
    texts = [
        _model_section(records, model_sums, reference_sums, (model, reference))
        for model, model_sums in sides.items()
        if model_sums and reference_sums
    ]
    if not texts:
        return ""
    note = f" The training domains ({escaped(', '.join(records.against))}) come first." if records.against else ""
    return (
        f"## Classes of tokens: differences to {escaped(reference)}\n\nEvery family of classes divides the predicted "
        "tokens of a domain. The contributions of a family add up to the difference: a contribution is the share of "
        "the tokens times the difference within the class. These are differences at equal tokens, so both models may "
        f"differ in domain as well.{note} A class that adds as much in domain as out of domain belongs to a model "
        "that has learned less. Losses are in nats per token; ± covers documents and seeds.\n\n" + "\n".join(texts)
    )


def _model_section(
    records: Records, model_sums: Sequence[ClassSums], reference_sums: Sequence[ClassSums], names: tuple[str, str]
) -> str:
    known = model_sums[0].domains
    domains = [domain for domain in (*records.against, *records.domains) if domain in known]
    header = ["domain", "class", "tokens", *map(escaped, names), "difference within", "contribution"]
    totals = [_class_cells(domain, classes.total(model_sums, reference_sums, domain)) for domain in domains]
    text = [f"### {escaped(names[0])}\n", markdown(header, totals, left=2)]
    for family in model_sums[0].names:
        rows = [
            _class_cells(domain, part)
            for domain in domains
            for part in classes.parts(model_sums, reference_sums, domain, family)
        ]
        text += [f"{FAMILIES[family]}\n", markdown(header, rows, left=2)]
    return "\n".join(text)


def _class_cells(domain: str, part: ClassPart) -> list[str]:
    losses = [f"{part.model_loss:.3f}", f"{part.reference_loss:.3f}", f"{part.difference:+.3f}"]
    return [escaped(domain), escaped(part.name), f"{part.share:.1%}", *losses, cell(part.contribution)]
