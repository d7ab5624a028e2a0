"""Runs that are kept in an object store: `--workdir=s3://bucket/run` or `gs://bucket/run`.

A run writes to a *spool*, a directory of this machine, from which its files are copied to the store after evaluations,
before saves and at the end: each one that has changed, whole, because objects cannot be appended to. What resumes a run
fetches them first, so it may be on another machine. Checkpoints are a matter of their own: Orbax writes those of gs://
itself, and those of s3:// are copied from the spool (seqjax/training/stored_checkpoints.py).

`spool.json` tells one run from another that was deleted and begun again under the same URL.
"""

import hashlib
import math
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from seqjax import store, urls
from seqjax.errors import UserError
from seqjax.files import as_json, cache_directory, write_json
from seqjax.training import stored_checkpoints
from seqjax.training.lock import FILE as LOCK
from seqjax.training.stored_checkpoints import DIRECTORY as CHECKPOINTS

IDENTITY = "spool.json"
LOG = "log.txt"  # of a study's run: the process that started this one is writing to it
READ_ONLY_WITHOUT = (CHECKPOINTS, "tensorboard", "profile", "wandb")  # folders that nobody reads through seqjax
ORBAX_MARKER = "commit_success.txt"  # which Orbax writes last into a checkpoint on gs://


class Spool:
    """Where a run's files are on this machine, `directory`, and the `url` where they are kept; "" if just there."""

    def __init__(self, workdir: str | os.PathLike[str]):
        """Raise `UserError` if `workdir` is a URL where no run can be kept. Nothing is read or written."""
        self.url = urls.url_of(workdir)
        self.directory = Path(workdir)
        if self.url:
            urls.require_workdir(self.url)
            self.directory = _cached("spool", self.url)
        self._sent: dict[str, tuple[int, int]] = {}  # name -> time and size of what is in the store
        self._guard = threading.Lock()

    def __str__(self) -> str:
        return self.url or str(self.directory)

    @property
    def is_direct(self) -> bool:
        """Whether Orbax writes the checkpoints where they are kept, though that is a store."""
        return urls.scheme(self.url) in urls.DIRECT

    @property
    def copies_checkpoints(self) -> bool:
        """Whether checkpoints are written to the spool and copied from there."""
        return bool(self.url) and not self.is_direct

    def pull(self, say: Callable[[str], None]) -> None:
        """Fetch the run as it is in the store, unless this machine has it further: it was cut off from the store.

        The caller holds the lock. Raises `UserError` if the store cannot be reached, or holds checkpoints alone.
        """
        if not self.url:
            return
        there = store.sizes(self.url)
        if "config.json" not in there and any(name.startswith(f"{CHECKPOINTS}/") for name in there):
            raise UserError(
                f"{self.url} has checkpoints but no config.json, so what made them is unknown. Give another one."
            )
        self._set_aside_another(there, say)
        names = [name for name in there if _is_file_of_run(name)]
        if self.copies_checkpoints:
            newest = max(stored_checkpoints.complete(there), default=-1)
            here = max(stored_checkpoints.local_steps(self.directory), default=-1)
            if here > newest:
                say(f"{self.directory} holds the checkpoint of step {here}, which did not reach {self.url}; it is sent")
            if here >= newest and here >= 0:
                names = [name for name in names if not (self.directory / name).exists()]
            elif newest >= 0:
                stored_checkpoints.fetch(self.url, newest, self.directory)
        names = [name for name in names if name != LOG or not (self.directory / LOG).exists()]
        store.in_threads(lambda name: store.download(f"{self.url}/{name}", self.directory / name), names)
        self._sent = {name: _stamp(self.directory / name) for name in names}

    def push(self) -> None:
        """Copy the files that have changed to the store, and remove there what was removed here.

        Process 0 alone does it. Raises `StoreError` if the store cannot be reached; what did not get there is sent the
        next time.
        """
        if not self.url or jax.process_index() != 0:
            return
        with self._guard:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not (self.directory / IDENTITY).exists():
                write_json(self.directory / IDENTITY, {"id": uuid.uuid4().hex})
            found = self._files()
            store.in_threads(self._send, [name for name, stamp in found.items() if self._sent.get(name) != stamp])
            for name in [name for name in self._sent if name not in found]:
                store.remove(f"{self.url}/{name}")
                del self._sent[name]

    def try_push(self, say: Callable[[str], None]) -> None:
        """Do `push`; a store that cannot be reached is only told."""
        try:
            self.push()
        except store.StoreError as error:
            say(f"{error} The files are in {self.directory} and are sent again later.")

    def push_last(self) -> None:
        """Do `push` at the end of the run; raise `UserError` that says where the files are."""
        try:
            self.push()
        except store.StoreError as error:
            raise UserError(
                f"{error} The files are in {self.directory}: the same command, on this machine, sends them."
            ) from error

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return the files to be kept, by name, with what tells whether they have changed."""
        found = {}
        for folder, _, names in os.walk(self.directory):
            for path in (Path(folder) / name for name in names):
                name = path.relative_to(self.directory).as_posix()
                if _is_file_of_run(name) and not path.is_symlink():
                    try:
                        found[name] = _stamp(path)
                    except FileNotFoundError:  # temporary
                        continue
        return found

    def _send(self, name: str) -> None:
        path = self.directory / name
        try:
            stamp, content = _stamp(path), path.read_bytes()  # at once: it may grow meanwhile
        except FileNotFoundError:
            return
        store.write(f"{self.url}/{name}", content)
        self._sent[name] = stamp

    def _set_aside_another(self, there: dict[str, int], say: Callable[[str], None]) -> None:
        """Move what the spool holds away if it is of another run than the one in the store."""
        if not (self.directory / "config.json").exists():
            return
        mine = (self.directory / IDENTITY).read_bytes() if (self.directory / IDENTITY).exists() else None
        theirs = store.read(f"{self.url}/{IDENTITY}") if IDENTITY in there else None
        if mine == theirs:
            return
        aside = self.directory.with_name(f"{self.directory.name}.{uuid.uuid4().hex[:8]}")
        aside.mkdir()
        for path in self.directory.iterdir():
            if path.name not in (LOCK, LOG):
                path.rename(aside / path.name)
        say(f"This machine has files of another run that was kept in {self.url}, by now deleted there: {aside}")


def readable(workdir: str | os.PathLike[str], *, fresh_seconds: float = 0.0) -> Path:
    """Return a directory of this machine with the files of a run, without its checkpoints: itself, or a copy.

    A copy that this process made less than `fresh_seconds` ago is taken as it is. Raises `UserError` for a URL that
    cannot be read.
    """
    url = urls.url_of(workdir)
    if not url:
        return Path(workdir)
    urls.require_workdir(url)
    seconds, copy = _read.get(url, (-math.inf, Path()))
    if time.monotonic() - seconds < fresh_seconds and copy.is_dir():
        return copy
    there = store.sizes(url)
    identity = store.read(f"{url}/{IDENTITY}") if IDENTITY in there else b""
    copy = _cached("runs", url, identity or b"")
    copy.mkdir(parents=True, exist_ok=True)
    names = [
        name
        for name, size in there.items()
        if _is_file_of_run(name)
        and name.partition("/")[0] not in READ_ONLY_WITHOUT
        # The losses of an evaluation are written once, so those of the same size are the same.
        and not (name.endswith(".npz") and (copy / name).is_file() and (copy / name).stat().st_size == size)
    ]
    store.in_threads(lambda name: store.download(f"{url}/{name}", copy / name), names)
    _read[url] = (time.monotonic(), copy)
    return copy


def has_checkpoint(workdir: str | os.PathLike[str], step: int) -> bool:
    """Return whether a run has a complete checkpoint of a step."""
    url = urls.url_of(workdir)
    directory = f"{CHECKPOINTS}/{step}"
    if not url:
        return (Path(workdir) / directory).is_dir()
    marker = ORBAX_MARKER if urls.scheme(url) in urls.DIRECT else stored_checkpoints.MARKER
    return marker in store.sizes(f"{url}/{directory}")


def write_result(workdir: str | os.PathLike[str], name: str, value: Any) -> str:
    """Write `value` as the JSON file `name` of a workdir that was read, and return its full name."""
    if url := urls.url_of(workdir):
        store.write(f"{url}/{name}", as_json(value))
        return f"{url}/{name}"
    write_json(Path(workdir) / name, value)
    return str(Path(workdir) / name)


_read: dict[str, tuple[float, Path]] = {}  # URL -> when and where a run was copied


def _cached(kind: str, url: str, identity: bytes = b"") -> Path:
    """Return the directory for a URL; its last part is that of the URL, the name of the run."""
    key = hashlib.sha256(url.encode() + b"\0" + identity).hexdigest()[:16]
    return cache_directory() / kind / key / url.rpartition("/")[2]


def _is_file_of_run(name: str) -> bool:
    """Return whether a file is to be kept: not a checkpoint's, a lock, or temporary."""
    parts = name.split("/")
    return parts[0] != CHECKPOINTS and not parts[0].startswith(LOCK) and not any(p.startswith(".") for p in parts)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size
