"""Find run differences that limit conclusions: tokens, optimisers, schedules."""

from collections.abc import Iterable, Sequence
from typing import Any

from seqjax import escape
from seqjax.errors import UserError
from seqjax.study.runs.record import Record

# Optimiser settings that may differ between comparable runs: the learning rate and its schedule.
NOT_OPTIMISER = ("lr", "warmup_steps", "final_lr", "cooldown")


def require_plain(names: Iterable[str], source: str) -> None:
    """Raise `UserError` for a name with control characters.

    A line feed in a name, for example, would forge table rows.
    """
    for name in names:
        if (printable := escape.terminal(name).replace("\n", "\\n").replace("\t", "\\t")) != name:
            raise UserError(f"{source}: the name '{printable:.60}' has control characters; leave them out.")


def remarks(runs: Sequence[Record]) -> list[str]:
    """Return a sentence for each run difference that limits conclusions."""
    sentences = []
    full = [run for run in runs if run.schedule == 1]
    most = {model: max(run.last.tokens for run in full if run.model == model) for model in {run.model for run in full}}
    tokens = _groups((run.model, f"{most[run.model]:,}") for run in full)  # a run that was dropped has fewer
    if len(tokens) > 1:
        sentences.append(
            f"Runs have different numbers of tokens ({_groups_text(tokens)}): gaps at equal in-domain loss remain "
            "valid, but differences at equal tokens and speed-ups exist only between runs with equal tokens."
        )
    optimisers = _groups((run.model, _optimiser(run.metadata.get("config", {}))) for run in full)
    if len(optimisers) > 1:
        sentences.append(
            f"Runs have different optimisers ({_groups_text(optimisers)}): a gap between them includes the "
            "optimiser's effect, so only gaps within one optimiser compare mixers."
        )
    schedules = _groups((run.model, "WSD" if run.is_wsd else "linear") for run in full if run.metadata.get("config"))
    if len(schedules) > 1:
        sentences.append(
            f"Runs have different schedules ({_groups_text(schedules)}): a gap between them includes the schedule's "
            "effect, so only gaps within one schedule compare mixers."
        )
    return sentences


def _groups(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return models by value, without unknown values."""
    groups: dict[str, list[str]] = {}
    for model, value in pairs:
        if value and model not in groups.setdefault(value, []):
            groups[value].append(model)
    return {value: models for value, models in groups.items() if models}


def _groups_text(groups: dict[str, list[str]]) -> str:
    return "; ".join(f"{value}: {', '.join(models)}" for value, models in groups.items())


def _optimiser(config: dict[str, Any]) -> str:
    settings = {key: value for key, value in config.get("optim", {}).items() if key not in NOT_OPTIMISER}
    return ", ".join(f"{key} {value}" for key, value in sorted(settings.items()))
