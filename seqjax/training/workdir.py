"""The directory of a run: its default name, its config, and the settings that may change when a run resumes in it."""

import argparse
import dataclasses
import itertools
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from seqjax import mixers, urls
from seqjax.config import Config, differences, from_config_dict, to_dict
from seqjax.errors import UserError
from seqjax.files import read_json, write_json
from seqjax.training.mirror import Mirror, readable

# Of `config.json` and of what it describes: names of settings, paths of parameters, items of checkpoints. Workdirs of
# version 4, that of seqjax 0.1.0, stay readable; those of lower versions are refused.
VERSION = 4

# Settings that do not change what a run computes, but for the order of sums; a resumed run may change them.
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


TOKENIZER = "tokenizer"  # the directory in a workdir with the tokenizer of a model that was imported


def fresh(config: Config) -> Path:
    """Create and return `runs/<config>-<size>-<time>`, the workdir of a run that was not given one.

    Of runs that start in the same second, all but the first get a number at the end of the name.
    """
    name = f"{config.name}-{config.size}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        workdir = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            workdir.parent.mkdir(exist_ok=True)
            workdir.mkdir()
        except FileExistsError:
            if not workdir.is_dir():
                raise UserError(f"{workdir.parent} is a file; give a --workdir.") from None
            continue
        except OSError as error:
            raise UserError(f"Cannot create {workdir} ({error.strerror}); give a --workdir.") from error
        return workdir
    raise AssertionError("there is always another number")


def check_config(workdir: str | Path | Mirror, config: Config) -> None:
    """Raise `UserError` if `workdir` holds a run with other settings, or of unknown ones. Nothing is written."""
    called, workdir = _called_and_read(workdir)
    if (workdir / "config.json").exists():
        # Whoever resumes the run has named the mixers of `config`, and no others.
        own = [mixer.name for mixer in config.model.mixers]
        old, new = to_dict(_loaded(workdir, called, allow_code=own)), to_dict(config)
        changed = [d for d in differences(old, new) if not d.startswith(MAY_CHANGE)]
        if changed:
            raise UserError(
                f"{called} holds a run with another config: {'; '.join(changed)}. "
                "Give the old values to go on with it, or another --workdir to start anew."
            )
    elif workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={called} is a file; give a directory.")
    elif any((workdir / "checkpoints").glob("*")):  # A run that ended before its first step leaves it empty.
        raise UserError(f"{called} has checkpoints but no config.json, so what made them is unknown. Give another one.")


def save_config(workdir: str | Path | Mirror, config: Config) -> None:
    """Create `workdir` and write `config.json`; raise `UserError` if it holds a run with other settings."""
    check_config(workdir, config)
    workdir = workdir.directory if isinstance(workdir, Mirror) else Path(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / "config.json", {"version": VERSION, **to_dict(config)})
    except OSError as error:
        raise UserError(f"Cannot write to {workdir} ({error.strerror}); give another --workdir.") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--workdir` and `--allow-code`, the arguments of `load_config`, to the parser of a command."""
    parser.add_argument("--workdir", required=True, type=urls.location, help="the directory of a run, also gs://")
    parser.add_argument(
        "--allow-code",
        action="append",
        default=[],
        metavar="MODULE",
        help="import the run's mixer from this module, which is not seqjax's; may be given several times",
    )


def load_config(workdir: str | Path, *, allow_code: Collection[str] = ()) -> Config:
    """Return the config of the run in `workdir`; raise `UserError` if it does not hold one.

    A config names the modules of its mixers, and whoever wrote the workdir chose them. So one from outside seqjax is
    imported only if `allow_code` holds its name; otherwise it is a `UserError`. A workdir may be a URL.
    """
    called, directory = _called_and_read(workdir)
    return _loaded(directory, called, allow_code=allow_code)


def _called_and_read(workdir: str | Path | Mirror) -> tuple[str, Path]:
    """Return what the user calls a workdir, and the directory of this machine where its files are read."""
    if isinstance(workdir, Mirror):
        return str(workdir), workdir.directory
    return urls.url_of(workdir) or str(workdir), readable(workdir)


def _loaded(workdir: Path, called: str, *, allow_code: Collection[str]) -> Config:
    path = workdir / "config.json"
    if not path.exists():
        inside = sorted(str(file.parent) for file in workdir.glob("*/config.json"))
        runs = f" It holds runs: {', '.join(inside[-5:])}." if inside else ""
        raise UserError(
            f"{called} is not a run: it has no config.json. Give the --workdir that a training run wrote.{runs}"
        )
    values = read_json(path)
    if "model_type" in values and "model" not in values:
        raise UserError(
            f"{called} holds a public model, not a run: `seqjax convert import --weights={called} --workdir=DIR` "
            f"makes one of it, and in Python seqjax.load({called!r}) opens it."
        )
    _require_known(values.pop("version", None), where=str(path))
    for name in _mixer_names(values):
        if mixers.is_foreign(name) and name not in allow_code:
            raise UserError(
                f"{path} names the mixer {name!r}, which is code from outside seqjax and has not been run. If you "
                f"trust it, allow it: --allow-code={name}, or in Python seqjax.load(..., mixers=(ITS_CLASS,))."
            )
    return _with_own_tokenizer(from_config_dict(values), workdir)


def _require_known(version: Any, *, where: str) -> None:
    """Raise `UserError` unless `version`, that of the `config.json` at `where`, is the one that is written today."""
    if isinstance(version, int) and version > VERSION:
        raise UserError(
            f"{where} was written by a later seqjax: its version is {version}, this one reads {VERSION}. Update seqjax "
            "to read it."
        )
    if version != VERSION:
        raise UserError(
            f"{where} was written by a version of seqjax before 0.1.0, which this one does not read; train again in "
            "another --workdir, or use that version."
        )


def _with_own_tokenizer(config: Config, workdir: Path) -> Config:
    """Return the config with the path of the tokenizer that `workdir` holds, which moves with it, if it holds one."""
    files = {"huggingface": "tokenizer.json", "mixtral": "tokenizer.model"}
    path = workdir / TOKENIZER / files.get(config.data.tokenizer, "")
    if not path.is_file():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer_path=str(path)))


def _mixer_names(values: dict[str, Any]) -> list[str]:
    """Return the names of the mixers in settings that have not been checked."""
    model = values.get("model")
    mixer = model.get("mixer") if isinstance(model, dict) else None
    groups = mixer if isinstance(mixer, list) else [mixer]
    return [str(group.get("name")) for group in groups if isinstance(group, dict)]
