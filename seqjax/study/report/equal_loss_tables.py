"""gaps.md of a study of protocol 2 (docs/protocol.md): verdicts, gaps at equal loss, rates, and the checks."""

import dataclasses
import itertools

import numpy as np

from seqjax.study import comparison, equal_loss
from seqjax.study.equal_loss import Measured, Row
from seqjax.study.records import Records
from seqjax.study.tables import DASH, cell, cost_table, entropy_table, markdown, remarks, runs_table

NOTES = (
    "Gap: that of {main} at the loss in domain of the worse model's last end, positive where the model is worse; ± is "
    "half its own 95% interval over documents, matched losses, interpolation and seeds, and not given for fewer than "
    "three seeds. Rates: the learning rates of the gap, the model's and the reference's. Over rates: the lowest and "
    "highest gap between all rates that are as good in domain as the best. Re-read: the gap between those of them that "
    "are best out of domain. At equal tokens: the difference of the last ends, outside and in domain. The verdict is "
    "that of the least favourable rate, tested together for all models of the study (Holm, 5%)."
)


def report(records: Records) -> str:
    """Return the content of gaps.md."""
    sections = [f"# {records.title}\n", _about(records)]
    known = comparison.models(records)
    for reference in records.references:
        sections.append(f"## Gaps to {reference}\n")
        if reference in known:
            sections.append(_gaps(records, reference))
        else:
            sections.append("It has no results yet, so there is nothing to compare with.\n")
    sections += ["## Learning rates\n", _rates(records)]
    if checked := _left_out(records):
        sections += ["## Interpolation\n", checked]
    sections += ["## Runs\n", runs_table(records), "## Cost\n", _cost(records)]
    if any(run.metadata.get("entropy") for run in records.runs):
        sections += ["## Entropy of attention\n", entropy_table(records)]
    return "\n".join(sections)


def gap_table(records: Records, reference: str) -> str:
    """Return the table of verdicts on all models against a reference, with the gaps that they rest on.

    Raises `UserError` if the study has no model of that name.
    """
    comparison.require_model(records, reference)
    main = comparison.main_quantity(records)
    header = ["model", "verdict", "seeds", "rates", "loss in domain", "gap", "over rates", "re-read"]
    header += ["at equal tokens, outside", "in domain"]
    rows = []
    for row in equal_loss.compare(records, reference):
        words = f"{row.verdict.words} ({row.verdict.why})" if row.verdict.why else row.verdict.words
        gap = row.gaps[main] if row.gaps is not None else None
        rows.append(
            [
                row.model,
                words,
                str(row.seeds),
                _rate_pair(row.rates),
                DASH if row.at is None else _span(*row.at),
                _measured(gap),
                _over_rates(row),
                _again(row),
                _measured(row.outside),
                _measured(row.inside),
            ]
        )
    return markdown(header, rows, left=2)


def _about(records: Records) -> str:
    text = [
        f"Protocol 2 (docs/protocol.md): every run is a trunk with a constant learning rate, read at its decayed ends. "
        f"Losses are in {records.unit.name}; in domain is the {comparison.x_label(records)}."
    ]
    if records.blocks is None:
        text.append("The losses of single blocks are not known here, so there are no intervals.")
    return " ".join(text) + "\n" + remarks(records)


def _gaps(records: Records, reference: str) -> str:
    rows = equal_loss.compare(records, reference)
    main = comparison.main_quantity(records)
    sections = [NOTES.format(main=main) + "\n", gap_table(records, reference)]
    if apart := [row.model for row in rows if row.gaps is None]:
        sections.append(
            f"No overlap: {'; '.join(apart)}. The better one's ends do not reach up to the worse one's last loss in "
            "domain (or no seed is common), so that they are compared at equal tokens alone.\n"
        )
    scale = equal_loss.limit(records) / equal_loss.LIMIT
    small = [
        row.model
        for row in rows
        if row.gaps is not None
        and abs(row.gaps[main].gap) < equal_loss.SMALL * scale
        and row.seeds < equal_loss.MORE_SEEDS
    ]
    if small:
        sections.append(f"Gaps below {equal_loss.SMALL * scale:.2g} want five seeds: {'; '.join(small)}.\n")
    if any(row.gaps is not None and row.seeds >= equal_loss.SEEDS for row in rows):
        sections.append("Each model's variance of seeds is drawn towards that of all models.\n")
    if len(quantities := comparison.quantities(records)) > 1:
        cells = [
            [row.model, *(_measured(row.gaps[name]) for name in quantities)] for row in rows if row.gaps is not None
        ]
        sections += [
            "The same gap by domain, each with its own 95% interval:\n",
            markdown(["model", *quantities], cells),
        ]
    return "\n".join(sections)


def _measured(found: Measured | None) -> str:
    return DASH if found is None else cell(found.estimate)


def _rate_pair(rates: tuple[float, float]) -> str:
    return f"x{rates[0]:g}, x{rates[1]:g}"


def _span(low: float, high: float) -> str:
    return f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} to {high:.3f}"


def _over_rates(row: Row) -> str:
    if row.n_pairs == 1:
        return "one pair"
    apart = f", {row.n_apart} of {row.n_pairs} without overlap" if row.n_apart else ""
    return DASH if row.over_rates is None else f"{row.over_rates[0]:+.3f} to {row.over_rates[1]:+.3f}{apart}"


def _again(row: Row) -> str:
    if row.again_rates == row.rates:
        return "the same rates"
    return DASH if row.again is None else f"{_measured(row.again)} ({_rate_pair(row.again_rates)})"


def _rates(records: Records) -> str:
    models = comparison.models(records)
    of_model = {model: equal_loss.rates(records, model) for model in models}
    tried = sorted({rate for found in of_model.values() for rate in found.found})
    rows = []
    for model, found in of_model.items():
        cells = {}
        for rate, (seeds, inside, outside) in found.found.items():
            text = f"{inside:.3f}, {outside:.3f} ({seeds})" + ("\\*" if rate in found.eligible else "")
            cells[rate] = f"**{text}**" if rate == found.best else text
        rows.append([model, *(cells.get(rate, DASH) for rate in tried), f"x{found.primary:g}"])
    text = (
        "Loss in domain and mean loss outside (each domain the same) at the last end, and the number of seeds in "
        "brackets, by learning rate as a multiple of the common one. In bold the best in domain, \\* the rates "
        "that are as good, on the seeds that all rates of the model have.\n\n"
        + markdown(["model", *(f"x{rate:g}" for rate in tried), "rate of the gap"], rows)
    )
    for edge in ("lowest", "highest"):
        if at_edge := [model for model, found in of_model.items() if found.edge == edge]:
            # A judgement drops a rate that is far behind, which then has no results.
            unless = " unless a missing run was there" if records.missing else ""
            text += f"\nBest at the {edge} rate that has results, extend the grid{unless}: {'; '.join(at_edge)}.\n"
    if only := [model for model, found in of_model.items() if found.edge == "only"]:
        text += f"\nOne rate alone, so that a better one is not excluded: {'; '.join(only)}.\n"
    neighbours = {model: between_rates(records, model) for model in models}
    if any(neighbours.values()):
        steps = sorted({pair for found in neighbours.values() for pair in found})
        rows = [
            [model, *(DASH if found.get(pair) is None else f"{found[pair]:+.3f}" for pair in steps)]
            for model, found in neighbours.items()
            if found
        ]
        header = ["model", *(f"x{high:g} to x{low:g}" for low, high in steps)]
        text += "\nGap of each learning rate to the next lower one of the same model, at equal loss in domain:\n\n"
        text += markdown(header, rows)
    return text


def _left_out(records: Records) -> str:
    rows = []
    for model in comparison.models(records):
        if errors := left_out(records, model):
            rows.append([model, str(len(errors)), f"{np.mean(errors):+.4f}", f"{np.max(np.abs(errors)):.4f}"])
    if not rows:
        return ""
    return (
        "Each inner end predicted by the cubic through the other ends of its run, in the main quantity: the mean error "
        "and the largest. The cubic through all ends has shorter gaps between them.\n\n"
        + markdown(["model", "ends", "mean error", "largest"], rows)
    )


def _cost(records: Records) -> str:
    known = comparison.models(records)
    gaps = {name: equal_loss.estimates(records, name) for name in records.references if name in known}
    runs = {model: equal_loss.shown_runs(records, model) for model in known}
    return cost_table(records, runs, gaps, at="at equal loss")


def between_rates(records: Records, model: str) -> dict[tuple[float, float], float | None]:
    """Return the gap of each learning rate of a model to the next lower one, at equal loss; None without overlap.

    The primary gap would not depend on the choice of a rate if these were zero.
    """
    weights = comparison.quantities(records)[comparison.main_quantity(records)]
    found = {}
    for low, high in itertools.pairwise(equal_loss.rates(records, model).found):
        matched = equal_loss.match_rates(records, (model, high), (model, low))
        found[low, high] = None if matched is None else float(matched.gaps.mean(0) @ weights)
    return found


def left_out(records: Records, model: str) -> list[float]:
    """Return how far each inner end of a model's primary runs is from the cubic through the other ends.

    The errors are predicted minus measured losses of the main quantity, of all seeds; [] for runs with two ends or one.
    """
    weights = comparison.quantities(records)[comparison.main_quantity(records)]
    errors = []
    for run in equal_loss.runs_at(records, model, equal_loss.rates(records, model).primary):
        x = run.losses_in_domain(records.against)
        for i in np.argsort(x, kind="stable")[1:-1]:
            others = dataclasses.replace(run, points=[p for j, p in enumerate(run.points) if j != i])
            predicted = equal_loss.interpolated(others, records.against, records.domains, float(x[i]))
            errors.append(float((predicted - run.losses(records.domains)[i]) @ weights))
    return errors
