"""A run's directory: its name, its config, and settings that may change."""

import argparse
import dataclasses
import itertools
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from seqjax import mixers, store, user_code
from seqjax.config import Config, differences, from_config_dict, to_dict
from seqjax.errors import UserError, nearest
from seqjax.files import replacing, write_json
from seqjax.reading import read_json
from seqjax.training.identity import LENGTH, MAY_CHANGE
from seqjax.training.mirrors import MIXERS, TOKENIZER, Mirror, readable, require_inside
from seqjax.training.provenance import RUN
from seqjax.training.schedule import end_steps

# Results; they need a config.json.
RESULTS = ("checkpoints/*", "ends/*", "eval_losses/[0-9]*.npz", "metrics.jsonl", "report.*")


# The format version of `config.json`, setting names, parameter paths and checkpoint items. seqjax 0.1.0 writes
# version 4, which stays readable. Lower versions are refused.
VERSION = 4


def fresh(config: Config) -> Path:
    """Create and return `runs/<config>-<size>-<time>`, the default workdir.

    Further runs that start in the same second get a number after the name.
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
    """Raise `UserError` if `workdir` holds a run with other or unknown settings.

    Nothing is written.
    """
    label, workdir = _label_and_directory(workdir)
    require_inside(workdir)
    if (workdir / "config.json").exists():
        # The user who resumes the run has allowed only the mixers of `config`.
        own_mixers = [mixer.name for mixer in config.model.mixers]
        recorded = _loaded(workdir, label, allow_code=own_mixers)
        _require_same_code(workdir, label, config)
        changed = [d for d in differences(to_dict(recorded), to_dict(config)) if not d.startswith(MAY_CHANGE)]
        changes_length_only = all(d.startswith(LENGTH) for d in changed)
        if changed and not (changes_length_only and _extends(recorded, config)):
            fix = "Give the old values to resume it, or another --workdir for a new run."
            if changes_length_only and not (recorded.train.ends or config.train.ends):
                fix = (
                    "Its learning rate decays over its full length, so train the new length in another --workdir "
                    f"(--init_from={label} starts from these weights); only a run with config.train.ends can be "
                    "extended."
                )
            raise UserError(f"{label} holds a run with another config: {'; '.join(changed)}. {fix}")
    elif workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={label} is a file; give a directory.")
    # A run that ended before its first step leaves an empty checkpoint directory and empty rows.
    elif results := [name for name in RESULTS if any(map(_has_content, workdir.glob(name)))]:
        result_name = next(workdir.glob(results[0].partition("/")[0])).name
        raise UserError(f"{label} has {result_name} but no config.json, so its run is unknown. Give another --workdir.")
    elif (workdir / "run.json").exists():  # written before config.json
        read_json(workdir / "run.json", RUN, fix="no run wrote it, so give another --workdir")


def _has_content(path: Path) -> bool:
    return path.name != "metrics.jsonl" or path.stat().st_size > 0


def _extends(recorded: Config, config: Config) -> bool:
    """Return whether `config` extends the run with config `recorded`: it adds ends.

    The two configs differ only in `LENGTH`. The trunk's learning rate does not depend on its length, so the trained
    part is also the start of the extended run.
    """
    longer = config.train.steps >= recorded.train.steps and bool({*end_steps(config)} - {*end_steps(recorded)})
    return bool(recorded.train.ends) and longer


def extension(workdir: str | Path | Mirror, config: Config) -> dict[str, Any]:
    """Return the run's earlier steps and ends if `config` extends it, else {}."""
    label, workdir = _label_and_directory(workdir)
    if not (workdir / "config.json").exists():
        return {}
    recorded = _loaded(workdir, label, allow_code=[mixer.name for mixer in config.model.mixers])
    return {"steps": recorded.train.steps, "ends": end_steps(recorded)} if _extends(recorded, config) else {}


def recorded_manifest(workdir: str | Path) -> str:
    """Return the manifest hash of a run's training data; "" if the run has not begun."""
    path = readable(workdir) / "run.json"
    return read_json(path, {"manifest?": str}).get("manifest", "") if path.is_file() else ""


def save_config(workdir: str | Path | Mirror, config: Config) -> None:
    """Create `workdir`, copy the user's mixer files, and write `config.json`.

    Raises `UserError` if it holds a run with other settings or other code.
    """
    check_config(workdir, config)
    workdir = workdir.directory if isinstance(workdir, Mirror) else Path(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        _copy_mixers(workdir, config)
        write_json(workdir / "config.json", {"version": VERSION, **to_dict(config)})
    except OSError as error:
        raise UserError(f"Cannot write to {workdir} ({error.strerror}); give another --workdir.") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--workdir` and `--allow-code`, for `load_config`, to a parser."""
    parser.add_argument("--workdir", required=True, type=store.location, help="a run's directory, also gs://")
    add_allow_code(parser)


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """Add `--allow-code` to a parser."""
    parser.add_argument(
        "--allow-code",
        action="append",
        default=[],
        metavar="MIXER",
        help="allow code from outside seqjax: the mixer's name in the run; may be repeated",
    )


def require_named(workdir: str | Path, config: Config, allow_code: Collection[str]) -> None:
    """Raise `UserError` if `allow_code` has an unknown name, or if code changed."""
    label, directory = _label_and_directory(workdir)
    _require_same_code(directory, label, config)
    for name in allow_code:
        if name not in (run_mixers := [mixer.name for mixer in config.model.mixers]):
            raise UserError(f"--allow-code={name}: {label} has no such mixer.{nearest(name, run_mixers)}")


def load_config(workdir: str | Path, *, allow_code: Collection[str] = ()) -> Config:
    """Return the config of the run in `workdir`.

    Raises `UserError` if it holds no run. The workdir's author chose the mixers and their code. Code from outside
    seqjax is a dotted module, or the copy of a file in the workdir. It runs only if `allow_code` has the mixer's name;
    otherwise a `UserError` is raised. A copy must have the hash in run.json. `workdir` may be a URL.
    """
    label, directory = _label_and_directory(workdir)
    return _loaded(directory, label, allow_code=allow_code)


def _label_and_directory(workdir: str | Path | Mirror) -> tuple[str, Path]:
    """Return the user's name for a workdir, and the local directory to read."""
    if isinstance(workdir, Mirror):
        return str(workdir), workdir.directory
    return store.url_of(workdir) or str(workdir), readable(workdir)


def _loaded(workdir: Path, label: str, *, allow_code: Collection[str]) -> Config:
    path = workdir / "config.json"
    if not path.exists():
        inside = sorted(str(file.parent) for file in workdir.glob("*/config.json"))
        runs = f" It holds runs: {', '.join(inside[-5:])}." if inside else ""
        raise UserError(
            f"{label} is not a run: it has no config.json. Give the --workdir that a training run wrote.{runs}"
        )
    values = read_json(path, fix="put back a copy of it, or train again in another --workdir")
    if "model_type" in values and "model" not in values:
        raise UserError(
            f"{label} holds a public model, not a run: `seqjax convert import --weights={label} --workdir=DIR` "
            f"converts it to a run, and in Python seqjax.load({label!r}) opens it."
        )
    _require_known(values.pop("version", None), where=str(path))
    for name in dict.fromkeys(mixer_names(values)):
        if mixers.is_foreign(name):
            _allow_mixer(name, workdir, label, allow_code)
    try:
        config = from_config_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return _with_known_cache(_with_own_tokenizer(config, workdir))


def _allow_mixer(name: str, workdir: Path, label: str, allow_code: Collection[str]) -> None:
    """Register the copy of a mixer's file.

    Raises `UserError` unless its name is allowed and its hash is recorded.
    """
    recorded = recorded_mixers(workdir).get(name) if mixers.label(name) == name else None
    if recorded is None and not mixers.is_dotted(name):
        raise UserError(
            f"{label} names the mixer {name!r} and has no copy of its code: the class was in a notebook or a script. "
            f"Register the class in Python, then call seqjax.load({label!r})."
        )
    if name not in allow_code:
        raise UserError(
            f"{label} names the mixer {name!r}, which is code from outside seqjax and has not been run. If you "
            f"trust it, allow it: --allow-code={name}, or in Python seqjax.load(..., allow_code={name!r})."
        )
    if mixers.is_dotted(name):
        return
    copy = user_code.read(workdir / MIXERS / mixers.file_name(name))
    if copy.sha256 != recorded:
        raise UserError(
            f"{copy.path} is not the file that {label} was trained with: its SHA-256 begins with {copy.sha256[:12]}, "
            f"and run.json has {str(recorded)[:12]}. Put back the file."
        )
    mixers.load_copy(name, copy)


def recorded_mixers(workdir: Path) -> dict[str, str]:
    """Return run.json's SHA-256 of mixer files from outside seqjax, by name."""
    path = workdir / "run.json"
    return read_json(path, {"mixers?": {str: str}}).get("mixers", {}) if path.is_file() else {}


def _require_same_code(workdir: Path, label: str, config: Config) -> None:
    """Raise `UserError` if a mixer file in this process differs from the run's file."""
    recorded = recorded_mixers(workdir)
    for name, source in mixers.sources(mixer.name for mixer in config.model.mixers).items():
        if recorded.get(name, source.sha256) != source.sha256:
            raise UserError(
                f"{label} was trained with another version of the mixer {name!r} than {source.path}. Restore its copy "
                f"{workdir / MIXERS / mixers.file_name(name)}, or use another --workdir."
            )


def _copy_mixers(workdir: Path, config: Config) -> None:
    """Copy the user's mixer files, with the content that was run, into the workdir."""
    files: dict[str, user_code.Source] = {}
    for name, source in mixers.sources(mixer.name for mixer in config.model.mixers).items():
        other = files.setdefault(mixers.file_name(name), source)
        if other.content != source.content:
            raise UserError(
                f"{other.path} and {source.path} would have the same copy {MIXERS}/{mixers.file_name(name)} in the "
                "workdir. Rename one of the mixers."
            )
    for file, source in files.items():
        (workdir / MIXERS).mkdir(exist_ok=True)
        with replacing(workdir / MIXERS / file) as copy:
            copy.write(source.content)


def _with_known_cache(config: Config) -> Config:
    """Return the config without `data.cache_dir`, unless seqjax has used it.

    Evaluating a stranger's run must not write to a directory that its config chooses.
    """
    directory = Path(config.data.cache_dir)
    cached = (path for name in ("blocks", "builtin-*") for path in directory.glob(name) if not path.is_symlink())
    if not config.data.cache_dir or any(path.is_dir() for path in cached):
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=""))


def _require_known(version: Any, *, where: str) -> None:
    """Raise `UserError` unless `version` is current.

    It was read from the `config.json` at `where`.
    """
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
    """Return the config with the path of the workdir's tokenizer, if it has one.

    The tokenizer moves with the workdir, so a recorded path may be stale.
    """
    files = {"huggingface": "tokenizer.json", "mixtral": "tokenizer.model"}
    path = workdir / TOKENIZER / files.get(config.data.tokenizer, "")
    if not path.is_file():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer_path=str(path)))


def mixer_names(values: dict[str, Any]) -> list[str]:
    """Return the mixer names in unchecked settings."""
    model = values.get("model")
    mixer = model.get("mixer") if isinstance(model, dict) else None
    groups = mixer if isinstance(mixer, list) else [mixer]
    return [str(group.get("name")) for group in groups if isinstance(group, dict)]
