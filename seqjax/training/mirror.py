"""The small files of a run that is kept in a store, `--workdir=gs://BUCKET/PATH`, and their mirror on this machine.

A run writes its files to `Mirror.directory`, from which those that have changed are copied to the store, whole, because
objects cannot be appended to. The store decides: a run that starts makes the mirror equal to what is there. Orbax
writes the checkpoints to the store itself (seqjax/training/checkpoint.py).
"""

import hashlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax

from seqjax import store, urls
from seqjax.errors import UserError
from seqjax.files import cache_directory
from seqjax.training import lock

CHECKPOINTS = "checkpoints"
LOG = "log.txt"  # The process that started a run of a study writes to it.
UNREAD = ("tensorboard", "profile", "wandb")  # folders that seqjax does not read


class Mirror:
    """The `directory` of this machine with a run's files, and the `url` where they are kept; "" if only here."""

    def __init__(self, workdir: str | os.PathLike[str]):
        """Raise `UserError` if `workdir` is a URL where no run can be kept. Nothing is read or written."""
        self.url = urls.url_of(workdir)
        self.directory = Path(workdir)
        if self.url:
            urls.require_workdir(self.url)
            self.directory = _cached("mirrors", self.url)
        self._sent: dict[str, tuple[int, int]] = {}  # name -> time and size of what is in the store

    def __str__(self) -> str:
        return self.url or str(self.directory)

    def pull(self) -> None:
        """Make the directory what is in the store; the caller holds the lock.

        Raises `UserError` if the store cannot be reached, or holds checkpoints alone.
        """
        if not self.url:
            return
        there = store.versions(self.url)
        if "config.json" not in there and any(name.startswith(f"{CHECKPOINTS}/") for name in there):
            raise UserError(
                f"{self.url} has checkpoints but no config.json, so what made them is unknown. Give another one."
            )
        _fetch(self.url, self.directory, {name: there[name] for name in there if name != LOG}, had={})
        self._sent = _stamps(self.directory)

    def push(self) -> None:
        """Copy the files that have changed to the store and remove there what was removed here; process 0 alone does.

        Raises `UserError` if the store cannot be reached.
        """
        if not self.url or jax.process_index() != 0:
            return
        found = _stamps(self.directory)
        changed = [name for name in found if self._sent.get(name) != found[name]]
        try:
            store.in_threads(lambda n: store.write(f"{self.url}/{n}", (self.directory / n).read_bytes()), changed)
            store.in_threads(lambda n: store.remove(f"{self.url}/{n}"), self._sent.keys() - found.keys())
        except store.StoreError as error:
            raise store.StoreError(f"{error} The same command goes on from the last checkpoint.") from error
        self._sent = found

    def try_push(self, say: Callable[[str], None]) -> None:
        """Do `push`; a store that cannot be reached is only told, because a later `push` makes up for it."""
        try:
            self.push()
        except store.StoreError as error:
            say(str(error))


def readable(workdir: str | os.PathLike[str], *, fresh_seconds: float = 0.0) -> Path:
    """Return a directory of this machine with the files of a run, without its checkpoints: itself, or a copy.

    A copy that this process made less than `fresh_seconds` ago is taken as it is. Raises `UserError` for a URL that
    cannot be read.
    """
    url = Mirror(workdir).url
    if not url:
        return Path(workdir)
    copy = _cached("runs", url)
    seconds, had = _read.get(str(copy), (-math.inf, {}))
    if time.monotonic() - seconds >= fresh_seconds:
        there = {name: v for name, v in store.versions(url).items() if name.partition("/")[0] not in UNREAD}
        _fetch(url, copy, there, had=had)
        _read[str(copy)] = (time.monotonic(), there)
    return copy


_read: dict[str, tuple[float, dict[str, str]]] = {}  # copy of a run -> when it was made, and the versions of its files


def _cached(kind: str, url: str) -> Path:
    """Return the directory for a URL; its last part is that of the URL, the name of the run."""
    return cache_directory() / kind / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rpartition("/")[2]


def _fetch(url: str, directory: Path, there: dict[str, str], *, had: dict[str, str]) -> None:
    """Make a directory equal to the files `there`, name -> version; those of the versions `had` are in it."""
    wanted = {name: version for name, version in there.items() if _is_small_file(name)}
    directory.mkdir(parents=True, exist_ok=True)
    for name in _stamps(directory).keys() - wanted.keys() - {LOG}:
        (directory / name).unlink(missing_ok=True)
    new = [name for name, version in wanted.items() if had.get(name) != version or not (directory / name).is_file()]
    store.in_threads(lambda name: store.download(f"{url}/{name}", directory / name), new)


def _is_small_file(name: str) -> bool:
    """Return whether a file is mirrored: not a checkpoint's, a lock, or temporary."""
    parts = name.split("/")
    return parts[0] != CHECKPOINTS and not parts[0].startswith(lock.FILE) and not any(p.startswith(".") for p in parts)


def _stamps(directory: Path) -> dict[str, tuple[int, int]]:
    """Return the time and size of the files of a run, by name; a file that is gone meanwhile is left out."""
    found = {}
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if _is_small_file(name) and path.is_file() and not path.is_symlink():
            found[name] = (path.stat().st_mtime_ns, path.stat().st_size)
    return found
