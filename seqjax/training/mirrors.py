"""A run's directory on this machine, and its copy in a store.

A run in a store, `--workdir=gs://BUCKET/PATH`, writes its small files to `Mirror.directory`. Changed files are copied
to the store whole, because objects cannot be appended to. The store is authoritative: a starting run makes the mirror
equal to the store. Orbax writes checkpoints directly to the store (seqjax/training/checkpoint.py).
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from seqjax import store
from seqjax.errors import UserError
from seqjax.files import cache_directory, remove_temporaries
from seqjax.training.lock import WorkdirLock, locked
from seqjax.training.schedule import ENDS, Segment

MIXERS = "mixers"  # workdir subdirectory with copies of the user's mixer files
TOKENIZER = "tokenizer"  # workdir subdirectory with the tokenizer of an imported model
LOG = "log.txt"  # written by the study process that started the run
NOT_MIRRORED = re.compile(r"checkpoints/|run\.lock|(.*/)?\.")  # hidden files are temporary
NOT_READ = re.compile(r"tensorboard/|profile/|wandb/")  # seqjax never reads these


class Mirror:
    """A run's local `directory` and its store's `url` ("" for a local run)."""

    def __init__(self, workdir: str | os.PathLike[str], *, lock: WorkdirLock | None = None):
        """Raise `UserError` if `workdir` cannot hold a run (`store.location`).

        Nothing is read or written.
        """
        workdir = store.location(workdir)
        self._lock = lock
        self.url = store.url_of(workdir)
        store.require_workdir(workdir)
        self.directory = _cached("mirrors", self.url) if self.url else Path(workdir)
        self._sent: dict[str, tuple[int, int]] = {}  # name -> time and size of the file in the store

    def __str__(self) -> str:
        return self.url or str(self.directory)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Return a context in which no other run writes to the workdir.

        Process 0 holds the lock.
        """
        if jax.process_index() != 0:
            yield
            return
        # A scheduler may restart a run before the lock of its first start is stale.
        is_restart = jax.process_count() > 1 or "SLURM_RESTART_COUNT" in os.environ
        with locked(str(self), wait=is_restart) as self._lock:
            yield

    def remove_temporaries(self) -> None:
        """Remove temporary files of a killed process.

        Call it after the checks that the workdir belongs to this run. Only this run's directories are cleaned; other
        directories below the workdir may belong to other active runs.
        """
        if not (self.directory / "run.json").is_file():
            return
        remove_temporaries(self.directory, below=bool(self.url))  # a mirror holds only this run's files
        for directory in _run_directories(self.directory):
            for subdirectory in (directory, directory / "eval_losses"):
                if subdirectory.is_dir():
                    remove_temporaries(subdirectory, below=False)

    def check_lock(self, *, reread: bool = False) -> None:
        """Raise `UserError` if another run has taken the workdir (`WorkdirLock.check`)."""
        if self._lock is not None:
            self._lock.check(reread=reread)

    def for_end(self, segment: Segment) -> "Mirror":
        """Return the mirror of an end's directory, inside this one, with the same lock."""
        return Mirror(segment.directory(self.directory), lock=self._lock)

    def pull(self) -> None:
        """Make the directory equal to the store; raise `UserError` if this fails.

        The caller holds the store's lock.
        """
        if self.url:
            versions = store.versions(self.url)
            if "config.json" not in versions and any(name.startswith("checkpoints/") for name in versions):
                raise UserError(
                    f"{self.url} has checkpoints but no config.json, so their run is unknown. Give another --workdir."
                )
            _fetch(
                self.url, self.directory, {name: versions[name] for name in versions if name != LOG}, local_versions={}
            )
            self._sent = _stamps(self.directory)

    def push(self, *, on_error: Callable[[str], None] | None = None) -> None:
        """Copy changed files to the store and remove files deleted here.

        Only process 0 does anything. Raises `UserError` if the store cannot be reached. With `on_error`, that function
        gets the message instead, because a later `push` retries.
        """
        if not self.url or jax.process_index() != 0:
            return
        stamps = _stamps(self.directory)
        changed = [name for name in stamps if self._sent.get(name) != stamps[name]]
        try:
            store.in_threads(lambda n: store.write(f"{self.url}/{n}", (self.directory / n).read_bytes()), changed)
            store.in_threads(lambda n: store.remove(f"{self.url}/{n}"), self._sent.keys() - stamps.keys())
            self._sent = stamps
        except store.StoreError as error:
            if on_error is None:
                raise store.StoreError(f"{error} The same command resumes from the last checkpoint.") from error
            on_error(str(error))


def _run_directories(workdir: Path) -> list[Path]:
    """Return the directories that hold the run's rows: the workdir and one per end."""
    return [workdir, *(end for end in sorted((workdir / ENDS).glob("*")) if end.name.isdecimal())]


# Names that a run appends to or removes from; other files are replaced whole.
WRITTEN = ("checkpoints", "ends", "eval_losses", "metrics.jsonl", MIXERS, "profile", "tensorboard", "wandb", TOKENIZER)


def require_inside(workdir: Path) -> None:
    """Raise `UserError` if a link would make a run write or delete outside `workdir`."""
    root = workdir.resolve()
    for directory in _run_directories(workdir):
        for path in (directory, *(directory / name for name in WRITTEN)):
            if path != workdir and path.is_symlink() and not path.resolve().is_relative_to(root):
                raise UserError(
                    f"{path} is a link to {path.resolve()}, which is outside the workdir, so a run does not write "
                    f"there. Move {path.name} into the workdir, or make the workdir itself a link."
                )


def readable(workdir: str | os.PathLike[str], *, fresh_seconds: float = 0.0) -> Path:
    """Return a local directory with a run's files, except checkpoints.

    This is the workdir, or a copy for a run in a store. A copy that this process made less than `fresh_seconds` ago is
    reused. Raises `UserError` as `pull` does.
    """
    url = Mirror(workdir).url
    copy = _cached("runs", url) if url else Path(workdir)
    copied_at, local_versions = _copies.get(copy, (None, {}))
    if url and (copied_at is None or time.monotonic() - copied_at >= fresh_seconds):
        versions = {name: version for name, version in store.versions(url).items() if not NOT_READ.match(name)}
        _fetch(url, copy, versions, local_versions=local_versions)
        _copies[copy] = (time.monotonic(), versions)
    return copy


_copies: dict[Path, tuple[float, dict[str, str]]] = {}  # copy of a run -> time of the copy, file versions


def _cached(kind: str, url: str) -> Path:
    return cache_directory() / kind / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rpartition("/")[2]


def _fetch(url: str, directory: Path, versions: dict[str, str], *, local_versions: dict[str, str]) -> None:
    """Make a directory equal to the files `versions`, name -> version.

    It already holds the versions `local_versions`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names, local_names = {name for name in versions if not NOT_MIRRORED.match(name)}, _stamps(directory).keys()
    for name in local_names - names - {LOG}:
        (directory / name).unlink(missing_ok=True)
    new = [name for name in names if name not in local_names or local_versions.get(name) != versions[name]]
    store.in_threads(lambda name: store.download(f"{url}/{name}", directory / name), new)


def _stamps(directory: Path) -> dict[str, tuple[int, int]]:
    """Return the time and size of a directory's small files, by name."""
    names = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file() and not p.is_symlink()]
    stats = {name: (directory / name).stat() for name in names if not NOT_MIRRORED.match(name)}
    return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()}
