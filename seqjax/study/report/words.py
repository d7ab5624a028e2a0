"""Describe a comparison in sentences: verdict, gap, differences at equal tokens."""

from seqjax.errors import UserError
from seqjax.study import gaps
from seqjax.study.gaps import Row
from seqjax.study.runs.record import Records


def verdict(records: Records, model: str, reference: str) -> str:
    """Return sentences on a model's OOD loss at the reference's in-domain loss.

    Raises `UserError` for an unknown model, or if `model` is `reference`.
    """
    row = find(records, model, reference)
    unit, tokens = records.unit.name, row.at_equal_tokens
    sentences = [f"Verdict on {model} against {reference}: {row.text}."]
    if row.gap is None:
        sentences.append(f"There is no gap at equal in-domain loss: {row.why}.")
    else:
        seeds = f"{row.seeds} seed{'s' * (row.seeds > 1)}, reference {row.reference_seeds}"
        domains = ", ".join(f"{name} {row.gaps[name].text()}" for name in records.domains)
        size = row.gap._replace(value=abs(row.gap.value)).text().removeprefix("+")
        side = "higher than" if row.gap.value > 0 else "lower than"
        sentences += [
            f"At an in-domain loss of {row.loss:.3f} {unit} and matched learning rates, its OOD loss is {size} {unit} "
            f"{side} the reference's ({seeds}).",
            f"As tuned: {row.as_tuned:+.3f}." if row.octaves else "",
            f"By domain: {domains}." if len(records.domains) > 1 else "",
            "± is half the width of the 95% interval." if row.gap.error is not None else "One seed has no interval.",
        ]
        if row.per_doubling is not None:
            sentences.append(f"Per doubling of training tokens the gap changes by {row.per_doubling.text()}.")
    if tokens is not None:
        sentences.append(
            f"At equal tokens the difference is {tokens.outside.text()} OOD and {tokens.inside.text()} in domain."
        )
    if row.parameters is not None and row.size is not None:
        more = f", {row.size - 1:+.1%}" if abs(row.size - 1) >= 5e-4 else ""
        sentences.append(f"{model} has {row.parameters / 1e6:.1f}M parameters{more}.")
    return " ".join(filter(None, sentences))


def find(records: Records, model: str, reference: str) -> Row:
    """Return the row for a model and a reference (any model in the study)."""
    for name in (model, reference):
        gaps.require_model(records, name)
    if model == reference:
        raise UserError(f"{model} is compared with itself; name another reference of {'; '.join(records.models)}.")
    return next(row for row in gaps.compare(records, reference) if row.model == model)


def in_one_line(records: Records, model: str, reference: str) -> str:
    """Return a model's gap in one line, with interval and p-value."""
    row = find(records, model, reference)
    unit, tokens = records.unit.name, row.at_equal_tokens
    if row.gap is None:
        difference = "" if tokens is None else f"; at equal tokens {tokens.outside.text()} {unit} OOD"
        return f"{model} against {reference}: no gap ({row.why}){difference}."
    p = "p unknown" if row.verdict.p is None else f"p = {row.verdict.p:.2g}"
    tuned = f", as tuned {row.as_tuned:+.3f}" if row.octaves else ""
    return (
        f"{model} against {reference}: gap {row.gap.text()} {unit}{tuned}, {p} ({row.seeds} and {row.reference_seeds} "
        f"seeds): {row.text}."
    )


def in_words(records: Records, reference: str) -> dict[str, list[str]]:
    """Return verdict -> models, best first, each with its gap and marks."""
    by_verdict: dict[str, list[str]] = {}
    for row in gaps.compare(records, reference):
        gap = "no gap" if row.gap is None else row.gap.text()
        needs = f"; needs: {row.verdict.needs}" if row.verdict.needs else ""
        by_verdict.setdefault(row.verdict.word, []).append(f"{row.model} ({gap}{row.marks}{needs})")
    return by_verdict
