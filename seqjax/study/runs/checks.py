"""Find run differences that limit conclusions: tokens, optimisers, schedules."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from seqjax import escape
from seqjax.errors import UserError
from seqjax.study.runs.record import Record
from seqjax.training import identity

# Optimiser settings that may differ between comparable runs: the learning rate and its schedule.
NOT_OPTIMISER = ("lr", "schedule", "warmup_steps", "final_lr", "cooldown")


class Training(NamedTuple):
    """Hold how a run was trained, as text; a part is "" if the run's config is unknown.

    Args:
        optimiser: The optimiser settings, without the learning rate and its schedule.
        schedule: "linear", "cosine" or "WSD".
    """

    optimiser: str = ""
    schedule: str = ""

    def fits(self, other: "Training") -> bool:
        """Return whether losses compare; unknown parts are taken to fit."""
        return all(not (x and y) or x == y for x, y in zip(self, other, strict=True))

    def known(self, other: "Training") -> "Training":
        """Return this training, with the parts that only `other` has."""
        return Training(*(x or y for x, y in zip(self, other, strict=True)))


def training(config: Mapping[str, Any]) -> Training:
    """Return how the run with this config.json was trained.

    A setting that an old config lacks has its default.
    """
    settings = identity.without_added({"optim": config.get("optim", {})})["optim"]
    optimiser = ", ".join(f"{key} {value}" for key, value in sorted(settings.items()) if key not in NOT_OPTIMISER)
    if "train" not in config:
        return Training(optimiser)
    return Training(optimiser, "WSD" if config["train"].get("ends") else settings.get("schedule", "linear"))


def require_one_training(configs: Iterable[tuple[str, str, Mapping[str, Any]]], source: str) -> None:
    """Raise `UserError` if a model has runs with different optimisers or schedules.

    `configs` has each run's label, model and config.json.
    """
    earlier: dict[str, tuple[str, Training]] = {}
    for label, model, config in configs:
        own = training(config)
        first, known = earlier.get(model, (label, own))
        if not own.fits(known):
            raise UserError(
                f"{source}: {first!r} and {label!r} are runs of {model!r} with different optimisers or schedules "
                f"({_text(known)}; {_text(own)}). Give them different `model` names."
            )
        earlier[model] = first, known.known(own)


def _text(how: Training) -> str:
    return ", ".join(filter(None, reversed(how)))


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
    for i, name in enumerate(Training._fields):
        groups = _groups((run.model, training(run.metadata.get("config", {}))[i]) for run in full)
        if len(groups) > 1:
            sentences.append(
                f"Runs have different {name}s ({_groups_text(groups)}): a gap between them would include the {name}'s "
                f"effect, so a model has a gap only to references with its {name}."
            )
    names = {run.metadata.get("config", {}).get("optim", {}).get("name", "adam") for run in full}
    if len(names) == 1 and "adam" not in names:
        sentences.append(
            f"All runs were trained with {names.pop()}; its matrices have the learning rates that are shown."
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
