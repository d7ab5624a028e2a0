"""Check that a workdir holds the run that a study defines: same settings, data and seed."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seqjax import mixers, store
from seqjax.config import Config, differences, from_config_dict, to_dict
from seqjax.errors import UserError
from seqjax.reading import read_json
from seqjax.study.runs import checks
from seqjax.study.runs.runner import Run
from seqjax.training import identity, mirrors, workdir

# Settings that change results at most through the order of sums, and names and paths. The data at a path has a separate
# hash.
LABELS = ("name", "size", "eval.path", "model.scan_layers", *identity.MAY_CHANGE)


def changed(recorded: Mapping[str, Any], config: Config, *, may_grow: bool = True) -> list[str]:
    """Return how a config differs from a config.json, as "optim.lr: 0.001 -> 0.002".

    A setting that did not exist when the file was written has its default value. Kernel backends are ignored, because
    they differ between machines. With `may_grow`, steps and ends may differ for runs with ends.
    """
    was = {key: value for key, value in recorded.items() if key != "version"}
    known = {mixer.name for mixer in config.model.mixers}
    # Importing a mixer runs code, so a file must not choose the mixer.
    if all(name in known or not mixers.is_foreign(name) for name in workdir.mixer_names(was)):
        with contextlib.suppress(UserError):  # settings of an earlier version
            was = to_dict(from_config_dict(was))
    now = _shared(to_dict(config), was)
    has_ends = config.train.ends and was.get("train", {}).get("ends")
    length = identity.LENGTH if may_grow and has_ends else ()
    changes = differences(_shared(was, now), now)
    keys = [text.split(": ")[0] for text in changes]
    relevant = [not key.startswith((*LABELS, *length)) and not key.endswith("implementation") for key in keys]
    return [text for text, is_relevant in zip(changes, relevant, strict=True) if is_relevant]


def _shared(values: Any, others: Any) -> Any:
    """Return `values` without the settings that `others` lacks; groups in lists too."""
    if isinstance(values, dict) and isinstance(others, dict):
        return {key: _shared(value, others[key]) for key, value in values.items() if key in others}
    if isinstance(values, list) and isinstance(others, list) and len(values) == len(others):
        return [_shared(*pair) for pair in zip(values, others, strict=True)]
    return values


def require(run: Run) -> bool:
    """Raise `UserError` if a run's workdir holds another run.

    Returns whether all its files were checked. If the run began before identities existed, only its settings are
    compared, and only if it has a config.json.
    """
    files, called = run.files, str(run.workdir)
    path = files / "config.json"
    if not path.is_file():
        if identity.recorded(files):
            raise UserError(
                f"{run.label}: {called}/config.json is missing; put back this run's file, or train again in a new "
                "workdir."
            )
        return False
    if run.config is not None and (changes := changed(read_json(path), run.config)):
        raise UserError(
            f"{run.label}: {called} holds a run with other settings: {'; '.join(changes)}. Give this run another "
            "workdir in the study file, or put back the settings."
        )
    return identity.require(files, label=called)


def require_distinct(runs: Sequence[Run], source: str) -> None:
    """Raise `UserError` if two runs are the same run.

    Seeds and rates must also agree with the configs, and a model's runs must have one optimiser and schedule.
    """
    _require_one({run.label: _workdir_key(run) for run in runs}, "the same workdir", source)
    configs = {run.label: run.config for run in runs if run.config is not None}
    _require_one({label: _settings(config) for label, config in configs.items()}, "the same settings", source)
    checks.require_one_training(
        ((run.label, run.model, to_dict(configs[run.label])) for run in runs if run.label in configs), source
    )
    orders: dict[int, tuple[int, str]] = {}
    scales: dict[str, tuple[float, str]] = {}
    for run in runs:
        if run.config is None:
            continue
        order, scale = run.config.data.seed, float(f"{run.config.optim.lr / run.rate:.6g}")
        if (first := orders.setdefault(run.seed, (order, run.label)))[0] != order:
            raise UserError(
                f"{source}: {first[1]!r} and {run.label!r} both have seed {run.seed}, but data.seed is {first[0]} and "
                f"{order}; runs with the same seed must have the same data.seed."
            )
        if (first := scales.setdefault(run.model, (scale, run.label)))[0] != scale:
            raise UserError(
                f"{source}: the rate of {run.label!r} is {run.rate:g} and its optim.lr {run.config.optim.lr:g}, which "
                f"does not agree with {first[1]!r}. Set `rate` to optim.lr divided by the study's common learning rate."
            )


def _workdir_key(run: Run) -> str:
    return store.url_of(run.workdir) or str(mirrors.Mirror(run.workdir).directory.absolute())


def _settings(config: Config) -> str:
    values = to_dict(config) | {"name": "", "size": ""}
    return json.dumps([identity.settings_of(values), values["train"], config.data.path])


def _require_one(values: Mapping[str, str], shared: str, source: str) -> None:
    seen: dict[str, str] = {}
    for label, value in values.items():
        if (first := seen.setdefault(value, label)) != label:
            raise UserError(f"{source}: {first!r} and {label!r} have {shared}; give each run different ones.")


def shared_manifest(run: Run, runs: Iterable[Run]) -> str:
    """Return the data hash from another begun run on the same data; "" without one.

    A study thus keeps its built-in text even if other packages are installed between its runs.
    """
    assert run.config is not None, "a run that is only read has no settings of data"
    same = [other for other in runs if other.config is not None and _data(other.config) == _data(run.config)]
    return next(filter(None, (workdir.recorded_manifest(other.workdir) for other in same)), "")


def _data(config: Config) -> dict[str, Any]:
    return to_dict(config)["data"] | {"seed": 0}
