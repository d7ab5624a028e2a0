"""The identity of a run: a hash of its settings and data, which its files carry.

`run.json` holds it. Every checkpoint and every file of evaluation losses names the identity of its directory. The
directory of an end has an identity of its own, a hash of the run's and of the end's step. So a file that was copied
from another run is refused by name, wherever it lies. `run.json` also holds a hash of `config.json`, which reveals a
`config.json` that was edited.

Runs that began before there were identities have none. Their files are read without these checks.
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

# Settings that change at most the order of sums in a run's results; a resumed run may change them.
MAY_CHANGE = (
    "log.",
    "checkpoint.",
    "mesh.",
    "train.per_device_batch_size",
    "train.accumulate",
    "data.path",
    "data.workers",  # a stream depends on it and says so itself
    "data.cache_dir",
    "data.tokenizer_path",
    "eval.classes",
    "eval.entropy_tokens",
)
LENGTH = ("train.steps", "train.ends")  # of a run with ends, they may grow
FORM = {"identity?": str, "settings?": [str]}  # in run.json
NOT_CHECKED = "it began before runs had identities, so it is not checked whether all of its files are its own"


def of(config: Config, *, manifest: str, test_sets: Mapping[str, str], origin: Mapping[str, Any]) -> str:
    """Return the identity of a new run, 64 hexadecimal digits.

    `manifest` and `test_sets` are the hashes of its data, and `origin` says how it began (seqjax/training/origin.py).
    The files of the user that define mixers are part of the settings.
    """
    weights = origin.get("init_from", {}).get("sha256", "")
    code = mixers.source_hashes(mixer.name for mixer in config.model.mixers)
    return _digest([settings_of(to_dict(config)), manifest, dict(test_sets), origin["rules"], weights, code])


def of_segment(identity: str | None, segment: Segment) -> str | None:
    """Return the identity of the directory of a segment: the run's, or one for an end; "" if the run has none."""
    return _of_end(identity, segment.end) if segment.is_cooldown else identity


def _of_end(identity: str | None, step: int) -> str | None:
    return identity and _digest([identity, "end", step])


def settings_of(values: Mapping[str, Any]) -> str:
    """Return the hash of the settings in a config.json without those that a run may change."""
    kept = dict(_flat(values, ""))
    changing = (*MAY_CHANGE, "version", *(LENGTH if kept.get("train.ends") else ()))
    return _digest({key: value for key, value in kept.items() if not key.startswith(changing)})


def _flat(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def recorded(directory: Path) -> str | None:
    """Return the identity in run.json; "" if the run began without one, None if there is no run.json."""
    path = directory / "run.json"
    return read_json(path, FORM).get("identity", "") if path.is_file() else None


def entry(directory: Path, config: Config, identity: str | None) -> dict[str, Any]:
    """Return the part of run.json about the identity; {} if the run has none.

    A later seqjax may write more settings into config.json. run.json is written first, so it has both hashes.
    """
    if not identity:
        return {}
    path = directory / "config.json"
    before = [read_json(path)] if path.is_file() else []
    return {"identity": identity, "settings": sorted({settings_of(values) for values in (*before, to_dict(config))})}


def require(workdir: Path, *, called: str = "") -> bool:
    """Raise `UserError` if config.json or the directory of an end is of another run; return whether it was checked.

    `called` is the user's name of the workdir. Losses and checkpoints are checked where they are read.
    """
    called = called or str(workdir)
    identity = recorded(workdir)
    if identity is None:
        return False
    _require_settings(workdir, called)
    for end in sorted(workdir.glob(f"{ENDS}/*")):
        wanted = _of_end(identity, int(end.name)) if end.name.isdecimal() else None
        if wanted is None or (found := recorded(end)) is None:
            continue
        if found != wanted:
            raise UserError(
                f"{called}/{ENDS}/{end.name} belongs to another run: its run.json has another identity than "
                f"{called}/run.json. Put back the directory that this run wrote, or move it away and train again."
            )
        _require_settings(end, f"{called}/{ENDS}/{end.name}")
    return bool(identity)


def _require_settings(directory: Path, called: str) -> None:
    settings = read_json(directory / "run.json", FORM).get("settings")
    path = directory / "config.json"
    if settings and path.is_file() and settings_of(read_json(path)) not in settings:
        raise UserError(
            f"{called}/config.json and run.json do not belong together: one was edited, or is of another run. Put back "
            "a copy of it; other settings need another --workdir."
        )
