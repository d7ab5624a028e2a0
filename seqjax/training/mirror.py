"""The small files of a run that is kept in a store, `--workdir=gs://BUCKET/PATH`, and their mirror on this machine.

A run writes its files to `Mirror.directory`, from which those that have changed are copied to the store, whole, because
objects cannot be appended to. The store decides: a run that starts makes the mirror equal to what is there. Orbax
writes the checkpoints to the store itself (seqjax/training/checkpoint.py).
"""

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import jax

from seqjax import store, urls
from seqjax.errors import UserError
from seqjax.files import cache_directory

LOG = "log.txt"  # The process that started a run of a study writes to it.
NOT_MIRRORED = re.compile(r"checkpoints/|run\.lock|(.*/)?\.")  # nor hidden files, which are temporary
NOT_READ = re.compile(r"tensorboard/|profile/|wandb/")  # by seqjax


class Mirror:
    """The `directory` of this machine with a run's files, and the `url` where they are kept; "" if only here."""

    def __init__(self, workdir: str | os.PathLike[str]):
        """Raise `UserError` if `workdir` is a URL where no run can be kept. Nothing is read or written."""
        self.url = urls.url_of(workdir)
        if self.url:
            urls.require_workdir(self.url)
        self.directory = _cached("mirrors", self.url) if self.url else Path(workdir)
        self._sent: dict[str, tuple[int, int]] = {}  # name -> time and size of what is in the store

    def __str__(self) -> str:
        return self.url or str(self.directory)

    def pull(self) -> None:
        """Make the directory what is in the store, whose lock the caller holds; raise `UserError` if it fails."""
        if self.url:
            there = store.versions(self.url)
            if "config.json" not in there and any(name.startswith("checkpoints/") for name in there):
                raise UserError(
                    f"{self.url} has checkpoints but no config.json, so what made them is unknown. Give another one."
                )
            _fetch(self.url, self.directory, {name: there[name] for name in there if name != LOG}, had={})
            self._sent = _stamps(self.directory)

    def push(self, *, say: Callable[[str], None] | None = None) -> None:
        """Copy the files that have changed to the store and remove there what was removed here; process 0 alone does.

        Raises `UserError` if the store cannot be reached; with `say` that is only told, for a later `push` mends it.
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


def readable(workdir: str | os.PathLike[str], *, fresh_seconds: float = 0.0) -> Path:
    """Return a directory of this machine with the files of a run, without its checkpoints: itself, or a copy.

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
    """Make a directory equal to the files `there`, name -> version; those of the versions `had` are in it."""
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
