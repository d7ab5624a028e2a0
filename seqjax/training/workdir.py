"""The directory of a run: its name, its config and its mutable settings, the run's metadata, and its mirror.

A run in a store, `--workdir=gs://BUCKET/PATH`, writes its small files to `Mirror.directory`. Changed files are copied
to the store whole, because objects cannot be appended to. The store is authoritative: a run that starts makes the
mirror equal to it. Orbax writes the checkpoints to the store itself (seqjax/training/checkpoint.py).
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import kernels_pallas
from seqjax import mixers, store, user_code
from seqjax.config import Config, differences, from_config_dict, to_dict
from seqjax.reading import read_json
from seqjax.training.identity import LENGTH, MAY_CHANGE
from seqjax.training.lock import WorkdirLock, locked
from seqjax.training.schedule import ENDS, Segment, end_steps
from seqjax.utils import UserError, cache_directory, is_text, nearest, remove_temporaries, replacing, write_json

# Only a run with a config.json has these.
RESULTS = ("checkpoints/*", "ends/*", "eval_losses/[0-9]*.npz", "metrics.jsonl", "report.*")
MIXERS = "mixers"  # the directory in a workdir with copies of the files of the user that define its mixers
TOKENIZER = "tokenizer"  # the directory in a workdir with the tokenizer of a model that was imported
LOG = "log.txt"  # The process that started a run of a study writes to it.
NOT_MIRRORED = re.compile(r"checkpoints/|run\.lock|(.*/)?\.")  # nor hidden files, which are temporary
NOT_READ = re.compile(r"tensorboard/|profile/|wandb/")  # by seqjax


class Mirror:
    """The local `directory` with a run's files, and the `url` of their store; "" if they are only local."""

    def __init__(self, workdir: str | os.PathLike[str], *, lock: WorkdirLock | None = None):
        """Raise `UserError` if no run can be kept in `workdir`: a URL, or no text. Nothing is read or written."""
        workdir = store.location(os.fspath(workdir))
        if not is_text(os.fspath(workdir)):
            raise UserError(
                f"{os.fspath(workdir)!a}: the locale of this shell has no such letters. Set PYTHONUTF8=1, or "
                "LC_ALL=C.UTF-8."
            )
        self._lock = lock
        self.url = store.url_of(workdir)
        if self.url:
            store.require_workdir(self.url)
        self.directory = _cached("mirrors", self.url) if self.url else Path(workdir)
        self._sent: dict[str, tuple[int, int]] = {}  # name -> time and size of what is in the store

    def __str__(self) -> str:
        return self.url or str(self.directory)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Return a context in which no other run writes to the workdir; process 0 holds the lock for all."""
        if jax.process_index() != 0:
            yield
            return
        # A scheduler may restart a run before the lock of its first start is stale.
        again = jax.process_count() > 1 or "SLURM_RESTART_COUNT" in os.environ
        with locked(str(self), wait=again) as self._lock:
            yield

    def remove_temporaries(self) -> None:
        """Remove what a killed process of this run left; call it when the run has been found to be the user's.

        Other directories below the workdir may be of other runs, which write at this moment.
        """
        if not (self.directory / "run.json").is_file():
            return
        remove_temporaries(self.directory, below=bool(self.url))  # a mirror has only files of the run
        for directory in _own_directories(self.directory):
            for place in (directory, directory / "eval_losses"):
                if place.is_dir():
                    remove_temporaries(place, below=False)

    def check_lock(self, *, look: bool = False) -> None:
        """Raise `UserError` if another run has taken the workdir (`WorkdirLock.check`)."""
        if self._lock is not None:
            self._lock.check(look=look)

    def of_end(self, segment: Segment) -> "Mirror":
        """Return the directory of a run's end, which is below this one and shares its lock."""
        return Mirror(segment.directory(self.directory), lock=self._lock)

    def pull(self) -> None:
        """Make the directory equal to the store, whose lock the caller holds; raise `UserError` if it fails."""
        if self.url:
            there = store.versions(self.url)
            if "config.json" not in there and any(name.startswith("checkpoints/") for name in there):
                raise UserError(
                    f"{self.url} has checkpoints but no config.json, so what made them is unknown. Give another one."
                )
            _fetch(self.url, self.directory, {name: there[name] for name in there if name != LOG}, had={})
            self._sent = _stamps(self.directory)

    def push(self, *, say: Callable[[str], None] | None = None) -> None:
        """Copy changed files to the store and remove those that were removed here; only process 0 does anything.

        Raises `UserError` if the store cannot be reached; with `say` it only prints a message, because a later `push`
        retries.
        """
        if not self.url or jax.process_index() != 0:
            return
        found = _stamps(self.directory)
        changed = [name for name in found if self._sent.get(name) != found[name]]
        try:
            store.in_threads(lambda n: store.write(f"{self.url}/{n}", (self.directory / n).read_bytes()), changed)
            store.in_threads(lambda n: store.remove(f"{self.url}/{n}"), self._sent.keys() - found.keys())
            self._sent = found
        except store.StoreError as error:
            if say is None:
                raise store.StoreError(f"{error} The same command goes on from the last checkpoint.") from error
            say(str(error))


def _own_directories(workdir: Path) -> list[Path]:
    """Return the directories with rows of a run: its own, and one for each of its ends."""
    return [workdir, *(end for end in sorted((workdir / ENDS).glob("*")) if end.name.isdecimal())]


# What a run writes to, or removes from, by its name; other files are replaced as a whole.
WRITTEN = ("checkpoints", "ends", "eval_losses", "metrics.jsonl", MIXERS, "profile", "tensorboard", "wandb", TOKENIZER)


def require_inside(workdir: Path) -> None:
    """Raise `UserError` if a run in `workdir` would write to, or remove, what lies elsewhere: a link leads there."""
    root = workdir.resolve()
    for directory in _own_directories(workdir):
        for path in (directory, *(directory / name for name in WRITTEN)):
            if path != workdir and path.is_symlink() and not path.resolve().is_relative_to(root):
                raise UserError(
                    f"{path} is a link to {path.resolve()}, which is outside the workdir, so a run does not write "
                    f"there. Move {path.name} into the workdir, or make the workdir itself a link."
                )


def readable(workdir: str | os.PathLike[str], *, fresh_seconds: float = 0.0) -> Path:
    """Return a local directory with the files of a run, without its checkpoints: the workdir itself, or a copy.

    A copy that this process made less than `fresh_seconds` ago is taken as it is. Raises `UserError` as `pull` does.
    """
    url = Mirror(workdir).url
    copy = _cached("runs", url) if url else Path(workdir)
    made, had = _read.get(copy, (None, {}))
    if url and (made is None or time.monotonic() - made >= fresh_seconds):
        there = {name: version for name, version in store.versions(url).items() if not NOT_READ.match(name)}
        _fetch(url, copy, there, had=had)
        _read[copy] = (time.monotonic(), there)
    return copy


_read: dict[Path, tuple[float, dict[str, str]]] = {}  # copy of a run -> when it was made, and the versions of its files


def _cached(kind: str, url: str) -> Path:
    return cache_directory() / kind / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rpartition("/")[2]


def _fetch(url: str, directory: Path, there: dict[str, str], *, had: dict[str, str]) -> None:
    """Make a directory equal to the files `there`, name -> version; it already holds the versions `had`."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted, here = {name for name in there if not NOT_MIRRORED.match(name)}, _stamps(directory).keys()
    for name in here - wanted - {LOG}:
        (directory / name).unlink(missing_ok=True)
    new = [name for name in wanted if name not in here or had.get(name) != there[name]]
    store.in_threads(lambda name: store.download(f"{url}/{name}", directory / name), new)


def _stamps(directory: Path) -> dict[str, tuple[int, int]]:
    """Return the time and size of the small files of a directory, by name."""
    names = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file() and not p.is_symlink()]
    found = {name: (directory / name).stat() for name in names if not NOT_MIRRORED.match(name)}
    return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in found.items()}


# Of `config.json` and of what it describes: names of settings, paths of parameters, items of checkpoints. Workdirs of
# version 4, that of seqjax 0.1.0, stay readable; those of lower versions are refused.
VERSION = 4


def fresh(config: Config) -> Path:
    """Create and return `runs/<config>-<size>-<time>`, the default workdir of a run.

    Runs that start in the same second, except the first, get a number at the end of the name.
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
    require_inside(workdir)
    if (workdir / "config.json").exists():
        # The user who resumes the run has named the mixers of `config`, and no others.
        own = [mixer.name for mixer in config.model.mixers]
        before = _loaded(workdir, called, allow_code=own)
        _require_same_code(workdir, called, config)
        changed = [d for d in differences(to_dict(before), to_dict(config)) if not d.startswith(MAY_CHANGE)]
        in_length = all(d.startswith(LENGTH) for d in changed)
        if changed and not (in_length and _extends(before, config)):
            fix = "Give the old values to go on with it, or another --workdir to start anew."
            if in_length and not (before.train.ends or config.train.ends):
                fix = (
                    "Its learning rate falls linearly over its own steps, so a run of another length is another run: "
                    f"give it another --workdir, and --init_from={called} to begin with these weights. A run with "
                    "config.train.ends can be extended."
                )
            raise UserError(f"{called} holds a run with another config: {'; '.join(changed)}. {fix}")
    elif workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={called} is a file; give a directory.")
    # A run that ended before its first step leaves the first directory and the rows empty.
    elif found := [name for name in RESULTS if any(map(_has_content, workdir.glob(name)))]:
        what = next(workdir.glob(found[0].partition("/")[0])).name
        raise UserError(f"{called} has {what} but no config.json, so what made them is unknown. Give another one.")
    elif (workdir / "run.json").exists():  # It is written first.
        read_json(workdir / "run.json", RUN, fix="it is not of a run, so give another --workdir")


def _has_content(path: Path) -> bool:
    return path.name != "metrics.jsonl" or path.stat().st_size > 0


def _extends(before: Config, config: Config) -> bool:
    """Return whether two configs that differ in `LENGTH` are of a run with ends that is extended: it gets new ones.

    The trunk's learning rate does not depend on its length, so that what was trained is also the start of the new run.
    """
    longer = config.train.steps >= before.train.steps and bool({*end_steps(config)} - {*end_steps(before)})
    return bool(before.train.ends) and longer


def extension(workdir: str | Path | Mirror, config: Config) -> dict[str, Any]:
    """Return the steps and ends that the run in `workdir` has had if `config` extends it, else {}."""
    called, workdir = _called_and_read(workdir)
    if not (workdir / "config.json").exists():
        return {}
    before = _loaded(workdir, called, allow_code=[mixer.name for mixer in config.model.mixers])
    return {"steps": before.train.steps, "ends": end_steps(before)} if _extends(before, config) else {}


def recorded_manifest(workdir: str | Path) -> str:
    """Return the manifest hash of the data that a run was trained on; "" if it has not begun."""
    path = readable(workdir) / "run.json"
    return read_json(path, {"manifest?": str}).get("manifest", "") if path.is_file() else ""


def save_config(workdir: str | Path | Mirror, config: Config) -> None:
    """Create `workdir`, copy the files of the user that define mixers, and write `config.json`.

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
    """Add `--workdir` and `--allow-code`, the arguments of `load_config`, to the parser of a command."""
    parser.add_argument("--workdir", required=True, type=store.location, help="the directory of a run, also gs://")
    add_allow_code(parser)


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """Add `--allow-code` to the parser of a command."""
    parser.add_argument(
        "--allow-code",
        action="append",
        default=[],
        metavar="MIXER",
        help="run the code of this mixer, which is not seqjax's: its name in the run; may be given several times",
    )


def require_named(workdir: str | Path, config: Config, allow_code: Collection[str]) -> None:
    """Raise `UserError` for a name in `allow_code` that no mixer of the run has, and for code that has changed."""
    called, directory = _called_and_read(workdir)
    _require_same_code(directory, called, config)
    for name in allow_code:
        if name not in (known := [mixer.name for mixer in config.model.mixers]):
            raise UserError(f"--allow-code={name}: {called} has no such mixer.{nearest(name, known)}")


def load_config(workdir: str | Path, *, allow_code: Collection[str] = ()) -> Config:
    """Return the config of the run in `workdir`; raise `UserError` if it does not hold one.

    The author of the workdir chose the mixers and their code. Code from outside seqjax, a dotted module or the copy of
    a file in the workdir, is therefore run only if `allow_code` holds the name of the mixer; otherwise a `UserError` is
    raised. A copy must have the hash in run.json. A workdir may be a URL.
    """
    called, directory = _called_and_read(workdir)
    return _loaded(directory, called, allow_code=allow_code)


def _called_and_read(workdir: str | Path | Mirror) -> tuple[str, Path]:
    """Return the user's name of a workdir, and the local directory where its files are read."""
    if isinstance(workdir, Mirror):
        return str(workdir), workdir.directory
    return store.url_of(workdir) or str(workdir), readable(workdir)


def _loaded(workdir: Path, called: str, *, allow_code: Collection[str]) -> Config:
    path = workdir / "config.json"
    if not path.exists():
        inside = sorted(str(file.parent) for file in workdir.glob("*/config.json"))
        runs = f" It holds runs: {', '.join(inside[-5:])}." if inside else ""
        raise UserError(
            f"{called} is not a run: it has no config.json. Give the --workdir that a training run wrote.{runs}"
        )
    values = read_json(path, fix="put back a copy of it, or train again in another --workdir")
    if "model_type" in values and "model" not in values:
        raise UserError(
            f"{called} holds a public model, not a run: `seqjax convert import --weights={called} --workdir=DIR` "
            f"makes one of it, and in Python seqjax.load({called!r}) opens it."
        )
    _require_known(values.pop("version", None), where=str(path))
    for name in dict.fromkeys(mixer_names(values)):
        if mixers.is_foreign(name):
            _allow_mixer(name, workdir, called, allow_code)
    try:
        config = from_config_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return _with_known_cache(_with_own_tokenizer(config, workdir))


def _allow_mixer(name: str, workdir: Path, called: str, allow_code: Collection[str]) -> None:
    """Register the copy of a mixer's file; raise `UserError` unless its name is allowed and its hash is recorded."""
    recorded = recorded_mixers(workdir).get(name) if mixers.label(name) == name else None
    if recorded is None and not mixers.is_dotted(name):
        raise UserError(
            f"{called} names the mixer {name!r}, of whose code it has no copy: the class was in a notebook or a "
            f"script. Register the class in Python, then call seqjax.load({called!r})."
        )
    if name not in allow_code:
        raise UserError(
            f"{called} names the mixer {name!r}, which is code from outside seqjax and has not been run. If you "
            f"trust it, allow it: --allow-code={name}, or in Python seqjax.load(..., allow_code={name!r})."
        )
    if mixers.is_dotted(name):
        return
    copy = user_code.read(workdir / MIXERS / mixers.file_name(name))
    if copy.sha256 != recorded:
        raise UserError(
            f"{copy.path} is not the file that {called} was trained with: its SHA-256 begins with {copy.sha256[:12]}, "
            f"and run.json has {str(recorded)[:12]}. Put back the file."
        )
    mixers.load_copy(name, copy)


def recorded_mixers(workdir: Path) -> dict[str, str]:
    """Return the SHA-256 of the files of a run's mixers from outside seqjax, by name, as run.json has them."""
    path = workdir / "run.json"
    return read_json(path, {"mixers?": {str: str}}).get("mixers", {}) if path.is_file() else {}


def _require_same_code(workdir: Path, called: str, config: Config) -> None:
    """Raise `UserError` if this process has a mixer of the run from a file with other content than the run had."""
    recorded = recorded_mixers(workdir)
    for name, source in mixers.sources(mixer.name for mixer in config.model.mixers).items():
        if recorded.get(name, source.sha256) != source.sha256:
            raise UserError(
                f"{called} was trained with another content of the mixer {name!r} than {source.path} has, see the copy "
                f"{workdir / MIXERS / mixers.file_name(name)}. Put that content back, or use another --workdir."
            )


def _copy_mixers(workdir: Path, config: Config) -> None:
    """Copy the files of the user that define mixers of a config, as they were when they were run, into the workdir."""
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
    """Return the config without `data.cache_dir`, unless seqjax has kept something in that directory before.

    Evaluating a run of a stranger must not write to a directory that its config chooses.
    """
    directory = Path(config.data.cache_dir)
    kept = (path for name in ("blocks", "builtin-*") for path in directory.glob(name) if not path.is_symlink())
    if not config.data.cache_dir or any(path.is_dir() for path in kept):
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=""))


def _require_known(version: Any, *, where: str) -> None:
    """Raise `UserError` unless `version`, that of the `config.json` at `where`, is the current one."""
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
    """Return the config with the path of the tokenizer in `workdir`, if any, because it moves with the workdir."""
    files = {"huggingface": "tokenizer.json", "mixtral": "tokenizer.model"}
    path = workdir / TOKENIZER / files.get(config.data.tokenizer, "")
    if not path.is_file():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer_path=str(path)))


def mixer_names(values: dict[str, Any]) -> list[str]:
    """Return the names of the mixers in settings that have not been checked."""
    model = values.get("model")
    mixer = model.get("mixer") if isinstance(model, dict) else None
    groups = mixer if isinstance(mixer, list) else [mixer]
    return [str(group.get("name")) for group in groups if isinstance(group, dict)]


def device_peak_bytes() -> int | None:
    """Return the peak memory in bytes of this process's first device, or None if the device does not report it."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def device_peak_gib() -> float | None:
    """Return `device_peak_bytes` in GiB."""
    peak = device_peak_bytes()
    return None if peak is None else peak / 2**30


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


# The form of `run_metadata` with the number of parameters, as `run.json` holds it.
RUN = {"versions": {str: str}, "device": str, "devices": int, "backends": dict, "commit": str, "parameters": int}


def run_metadata(**extra: Any) -> dict[str, Any]:
    """Return the metadata that identifies a run: versions, devices, kernel backends and commit, and `extra`."""
    packages = (
        "seqjax",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "numpy",
        "jax-triton",
        "triton",
    )
    return {
        "python": platform.python_version(),
        "versions": installed_versions(packages),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "backends": kernels_pallas.backends_used(),
        "commit": commit_of(Path(__file__).parents[1]),
        **extra,
    }


def commit_of(package: Path) -> str:
    """Return the git commit of the code in the directory `package`, with "-dirty" after changes; "" if it is unknown.

    A copy without a git history has it in the file COMMIT, which a wheel contains and `git rev-parse HEAD >
    seqjax/COMMIT` writes before a checkout is copied.
    """
    # Not a history further up: that of a project whose virtual environment holds seqjax.
    if (package.parent / ".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with contextlib.suppress(FileNotFoundError):  # a container without git
            done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout.strip()
    recorded = package / "COMMIT"
    return recorded.read_text(encoding="utf-8").strip() if recorded.is_file() else ""
