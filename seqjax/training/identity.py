"""The identity of a run: a hash of its settings and data, recorded in its files.

`run.json` holds it. Each checkpoint and each evaluation-loss file records the identity of its directory. An end's
directory has a separate identity, a hash of the run identity and the end's step. A file copied from another run is
therefore refused, wherever it lies. `run.json` also holds a hash of `config.json`, which reveals edits.

Runs started before identities existed have none. Their files are read without these checks.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from seqjax import mixers
from seqjax.config import Config, to_dict
from seqjax.errors import UserError
from seqjax.reading import read_json
from seqjax.training.schedule import ENDS, Segment

# A resumed run may change these settings: they change results at most through the order of sums.
MAY_CHANGE = (
    "log.",
    "checkpoint.",
    "mesh.",
    "train.per_device_batch_size",
    "train.accumulate",
    "data.path",
    "data.workers",  # a stream depends on it and checks it
    "data.cache_dir",
    "data.tokenizer_path",
    "eval.classes",
    "eval.entropy_tokens",
)
LENGTH = ("train.steps", "train.ends")  # may grow in a run with ends
# Settings that are newer than identities, and their defaults; a mixer's setting has the mixer's name before it. Hashes
# leave a default out, so identities do not change.
ADDED = {
    "model.attn_residual": None,
    "data.reset": False,
    **{f"model.mixer.{name}.rescale_init": True for name in ("transformer", "transformer_pp")},
    **{
        f"model.mixer.{name}.rope_share": 1.0
        for name in ("transformer", "transformer_pp", "top1_chunk", "top1_element", "nsa")
    },
    "model.mixer.gated_deltanet.value_heads": None,
    "model.mixer.kda.gate_rank": None,
    "optim.name": "adam",
    "optim.adam_lr": None,
    "optim.muon_scale": "spectral",
    "optim.muon_momentum": 0.95,
    "optim.schedule": "linear",
}
FORM = {"identity?": str, "settings?": [str]}  # in run.json
NOT_CHECKED = "it began before runs had identities, so its files are not checked"


def of(config: Config, *, manifest: str, test_sets: Mapping[str, str], origin: Mapping[str, Any]) -> str:
    """Return the identity of a new run, 64 hexadecimal digits.

    `manifest` and `test_sets` are hashes of its data. `origin` describes how it began (seqjax/training/origin.py).
    Hashes of the user's mixer files are included.
    """
    weights = origin.get("init_from", {}).get("sha256", "")
    code = mixers.source_hashes(mixer.name for mixer in config.model.mixers)
    return _digest([settings_of(to_dict(config)), manifest, dict(test_sets), origin["rules"], weights, code])


def of_segment(identity: str | None, segment: Segment) -> str | None:
    """Return the identity of a segment's directory.

    This is the run identity, or a separate identity for an end. A run without an identity gives "" or None.
    """
    return _of_end(identity, segment.end) if segment.is_cooldown else identity


def _of_end(identity: str | None, step: int) -> str | None:
    return identity and _digest([identity, "end", step])


def settings_of(values: Mapping[str, Any]) -> str:
    """Return the hash of a config.json, without the settings that a run may change."""
    settings = dict(_flat(without_added(values), ""))
    changing = (*MAY_CHANGE, "version", *(LENGTH if settings.get("train.ends") else ()))
    return _digest({key: value for key, value in settings.items() if not key.startswith(changing)})


def without_added(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the settings of a config.json without the settings in `ADDED` that have their default.

    `path` is the prefix of their keys.
    """
    kept: dict[str, Any] = {}
    for key, value in values.items():
        where = f"{path}{key}"
        if where in ADDED and value == ADDED[where]:
            continue
        if isinstance(value, dict):
            value = _group_without_added(value, where)
        elif isinstance(value, list):
            value = [_group_without_added(x, where) if isinstance(x, dict) else x for x in value]
        kept[key] = value
    return kept


def _group_without_added(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    return without_added(
        values, f"{path}.{values['name']}." if path == "model.mixer" and "name" in values else f"{path}."
    )


def _flat(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def recorded(directory: Path) -> str | None:
    """Return the identity in run.json.

    Returns "" if the run began without an identity, and None without a run.json.
    """
    path = directory / "run.json"
    return read_json(path, FORM).get("identity", "") if path.is_file() else None


def entry(directory: Path, config: Config, identity: str | None) -> dict[str, Any]:
    """Return the identity's fields for run.json; {} if the run has no identity.

    A newer seqjax may write more settings into config.json. Both hashes are recorded, because run.json is written
    first.
    """
    if not identity:
        return {}
    path = directory / "config.json"
    recorded = [read_json(path)] if path.is_file() else []
    return {"identity": identity, "settings": sorted({settings_of(values) for values in (*recorded, to_dict(config))})}


def require(workdir: Path, *, label: str = "") -> bool:
    """Check config.json and end directories against run.json.

    Returns whether the run has an identity to check. `label` is the user's name for the workdir. Losses and
    checkpoints are checked when they are read. Raises `UserError` if config.json was edited, or if an end's directory
    belongs to another run.
    """
    label = label or str(workdir)
    identity = recorded(workdir)
    if identity is None:
        return False
    _require_settings(workdir, label)
    for end in sorted(workdir.glob(f"{ENDS}/*")):
        expected = _of_end(identity, int(end.name)) if end.name.isdecimal() else None
        if expected is None or (end_identity := recorded(end)) is None:
            continue
        if end_identity != expected:
            raise UserError(
                f"{label}/{ENDS}/{end.name} belongs to another run: its run.json has another identity than "
                f"{label}/run.json. Put back this run's directory, or move it away and train again."
            )
        _require_settings(end, f"{label}/{ENDS}/{end.name}")
    return bool(identity)


def _require_settings(directory: Path, label: str) -> None:
    settings = read_json(directory / "run.json", FORM).get("settings")
    path = directory / "config.json"
    if settings and path.is_file() and settings_of(read_json(path)) not in settings:
        raise UserError(
            f"{label}/config.json and run.json do not belong together: one was edited, or comes from another run. Put "
            "back this run's copy; other settings need another --workdir."
        )
