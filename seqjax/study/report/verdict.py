"""The result of a study in words: whether a model costs base capabilities, and how certain that is."""

import numpy as np

from seqjax.study import comparison, equal_loss
from seqjax.study.comparison import Gap, Row
from seqjax.study.records import Records
from seqjax.study.statistics import Estimate
from seqjax.utils import UserError


def verdict(records: Records, model: str, reference: str) -> str:
    """Return sentences on the loss of `model` out of domain at the same loss in domain as `reference`.

    The numbers are those of `comparison.compare`: the gap of the mean over the domains, positive where the model is
    worse, its 95% interval, and the remainder after any other cause that the study tested. In protocol 2 they are those
    of `equal_loss.compare`. Raises `UserError` for a model that the study does not have.
    """
    for name in (model, reference):
        comparison.require_model(records, name)
    if model == reference:
        raise UserError(f"{model} is compared with itself; name another reference of {', '.join(records.references)}.")
    if records.protocol == 2:
        return _at_equal_loss(records, model, reference)
    row = next(row for row in comparison.compare(records, reference) if row.model == model)
    if row.lowest is None:
        return f"It cannot be said: no seed of {model} and {reference} passed through a common loss in domain."
    quantity, unit, at = comparison.main_quantity(records), records.unit.name, row.lowest.low
    estimate = row.lowest.estimates[quantity]
    of_domains = ", ".join(f"{domain} {_signed(row.lowest.estimates[domain])}" for domain in records.domains)
    sentences = [
        f"{_answer(row.lowest, estimate)} At a loss in domain of {at:.3f} {unit}, the lowest that both reached, "
        f"{model} is {_distance(estimate, unit)} out of domain than {reference} ({quantity}).",
        f"By domain: {of_domains}." if len(records.domains) > 1 else "",
        f"In domain {model} ends at {_end(records, model):.3f}, {reference} at {_end(records, reference):.3f}.",
        _certainty(row.lowest, estimate),
        _cause(row, quantity),
    ]
    return " ".join(filter(None, sentences))


def in_words(records: Records, reference: str) -> dict[str, list[str]]:
    """Return the models by the verdict on them against a reference, in words: each with its gap, best first."""
    quantity, found = comparison.main_quantity(records), dict[str, list[str]]()
    for row in equal_loss.compare(records, reference) if records.protocol == 2 else ():
        words = f"{row.verdict.words} ({row.verdict.why})" if row.verdict.why else row.verdict.words
        gap = "" if row.gaps is None else f" ({_signed(row.gaps[quantity].estimate)})"
        found.setdefault(words, []).append(f"{row.model}{gap}")
    for row in comparison.compare(records, reference) if records.protocol == 1 else ():
        if row.lowest is None:
            found.setdefault("It cannot be said: no common loss in domain.", []).append(row.model)
            continue
        estimate, reading = row.lowest.estimates[quantity], comparison.reading(row, quantity)
        words = _answer(row.lowest, estimate)
        if reading == "stays" or reading.startswith("closed"):
            words += f" The gap {'stays' if reading == 'stays' else f'is {reading}'}."
        elif reading.startswith("not tested"):
            words += " Learning rate and schedule were not tested."
        found.setdefault(words, []).append(f"{row.model} ({_signed(estimate)})")
    return found


def _at_equal_loss(records: Records, model: str, reference: str) -> str:
    """Return the verdict of protocol 2 in words."""
    row = next(row for row in equal_loss.compare(records, reference) if row.model == model)
    quantity, unit = comparison.main_quantity(records), records.unit.name
    sentences = []
    if row.gaps is None:
        sentences.append(f"It cannot be said at equal loss: {row.verdict.why}.")
    else:
        gap, at = row.gaps[quantity].estimate, np.mean(row.at or np.nan)
        seeds = f"{row.seeds} seed{'s' * (row.seeds > 1)}"
        why = f" ({row.verdict.why})" if row.verdict.why else ""
        of_domains = ", ".join(f"{domain} {_signed(row.gaps[domain].estimate)}" for domain in records.domains)
        sentences += [
            f"The verdict on {model} against {reference}: {row.verdict.words}{why}. At a loss in domain of {at:.3f} "
            f"{unit}, that of the worse one's last end, {model} is {_distance(gap, unit)} out of domain than "
            f"{reference} ({quantity}).",
            f"By domain: {of_domains}." if len(records.domains) > 1 else "",
            f"± is half the 95% interval over documents and {seeds}."
            if gap.half_width is not None
            else f"There is no interval: {equal_loss.untested(row)}.",
        ]
        if row.over_rates is not None and row.n_pairs > 1:
            low, high = row.over_rates
            sentences.append(f"Over the learning rates that are as good in domain it is {low:+.3f} to {high:+.3f}.")
    if row.outside is not None and row.inside is not None:
        sentences.append(
            f"At equal tokens the difference is {_signed(row.outside.estimate)} out of domain and "
            f"{_signed(row.inside.estimate)} in domain."
        )
    return " ".join(filter(None, sentences))


def _answer(gap: Gap, estimate: Estimate) -> str:
    if estimate.differs is None:
        return "How sure it is, is not known."
    if not estimate.differs:
        return "The two cannot be told apart."
    where = "" if gap.seeds > 1 else " in these two runs"
    return f"Yes, it costs{where}." if estimate.gap > 0 else f"No, it gains{where}."


def _distance(estimate: Estimate, unit: str) -> str:
    width = "" if estimate.half_width is None else f" ± {estimate.half_width:.3f}"
    return f"{abs(estimate.gap):.3f}{width} {unit} {'worse' if estimate.gap > 0 else 'better'}"


def _signed(estimate: Estimate) -> str:
    width = "" if estimate.half_width is None else f" ± {estimate.half_width:.3f}"
    return f"{estimate.gap:+.3f}{width}"


def _end(records: Records, model: str) -> float:
    """Return the loss in domain at the end of the full runs at the common rate, the mean over seeds."""
    return float(np.mean([run.losses_in_domain(records.against)[-1] for run in comparison.common_runs(records, model)]))


def _certainty(gap: Gap, estimate: Estimate) -> str:
    if estimate.differs is None:
        return "The losses of single blocks were not kept, so there is no interval."
    if gap.seeds > 1:
        return f"± is half the 95% interval over documents and {gap.seeds} seeds."
    return "± is half the 95% interval over documents alone: there is one seed, and another may move the gap further."


def _cause(row: Row, quantity: str) -> str:
    """Return the remainder of a gap where another cause was tested; nothing if there is no gap."""
    reading = comparison.reading(row, quantity)
    if reading in ("none", "no interval"):
        return ""
    if reading.startswith("not tested"):
        turns = " Over higher losses in domain its sign changes." if reading != "not tested" else ""
        return f"Whether the learning rate or its schedule is behind it was not tested.{turns}"
    what = {"learning rate": "each at its best learning rate", "schedule": "with schedules that have ended"}
    found = [f"{what[cause]} it is {_signed(gap.estimates[quantity])}" for cause, gap in comparison.causes(row).items()]
    return f"The gap {'stays' if reading == 'stays' else 'is ' + reading}: {', '.join(found)}."
