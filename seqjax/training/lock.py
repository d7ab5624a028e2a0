"""The lock of a workdir: at any time one run writes to it; a second one is refused with the first one's host and pid.

The lock is the file `run.lock`, which a run creates with O_EXCL, touches while it lives, and removes at its end. It
names the host, the process and its start, so what a killed run leaves behind is recognised (lock_holder.py), on another
host by the file's time. A job that a scheduler starts again waits until the file is old, or for a sign of life.

Times are compared with that of a file written beside it, so they come from one clock, that of the file server.
Readers (evaluate, generate, reports) need no lock.
"""

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from seqjax.errors import UserError
from seqjax.training import lock_holder
from seqjax.training.lock_holder import Holder

FILE = "run.lock"
BEAT_SECONDS = 20.0
LOOK_SECONDS = 1.0
SETTLE_SECONDS = 0.2  # in which others that saw the same dead lock put back what they moved


class WorkdirLock:
    """A lock that this process holds; `locked` makes one."""

    def __init__(self, path: Path, holder: Holder):
        self._path, self._holder = path, holder
        self._directory = _identity(path.parent)
        self._opened = os.open(path.parent, os.O_RDONLY)  # still the workdir when it is moved
        self._lost_to: str | None = None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="workdir lock", daemon=True)
        self._thread.start()

    def check(self, *, look: bool = False) -> None:
        """Raise `UserError` if another run has taken the workdir, because this process stood still for minutes.

        With `look` also if the workdir is no longer where it was: what is written there would be lost.
        """
        if look and _identity(self._path.parent) != self._directory:
            raise UserError(
                f"{self._path.parent} was moved or deleted while this run wrote to it. Nothing more is written; to go "
                "on from the last checkpoint, run the same command again with --workdir=DIR, where it is now."
            )
        if self._lost_to is not None:
            raise UserError(
                f"{self._path.parent} was taken by {self._lost_to}: this run did not move for more than "
                f"{lock_holder.STALE_SECONDS / 60:.0f} minutes and was taken for dead. Its last checkpoint is good; "
                "let the other one go on."
            )

    def release(self) -> None:
        """Remove the file, unless it is another run's by now, also from a workdir that was moved."""
        self._released.set()
        self._thread.join()
        try:
            with open(self._path.name, encoding="utf-8", opener=self._open_there) as file:
                token = json.load(file).get("token")
            if token == self._holder.token:
                os.unlink(self._path.name, dir_fd=self._opened)
        except (FileNotFoundError, ValueError, AttributeError):
            pass  # It is gone, or another run is writing its own.
        finally:
            os.close(self._opened)

    def _open_there(self, name: str, flags: int) -> int:
        return os.open(name, flags, dir_fd=self._opened)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            try:
                found = _read(self._path)
                if found is not None and found.token != self._holder.token:
                    self._lost_to = f"process {found.pid} on {found.host}"
                    return
                os.utime(self._path)
            except OSError:
                continue  # A file server that is away for a while; the file's age tells the others.


@contextlib.contextmanager
def locked(workdir: str | Path, *, wait: bool = False) -> Iterator[WorkdirLock]:
    """A context in which this process alone writes to `workdir`, which is created if it does not exist.

    A directory that was created here is removed again if a `UserError` leaves it empty. With `wait`, a run on another
    host is waited for until it has released the lock, has touched it, or has not for `lock_holder.STALE_SECONDS`.

    Raises `UserError` if another run holds it or it cannot be written.
    """
    workdir = Path(workdir)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file; give a directory.")
    is_new = not workdir.exists()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = WorkdirLock(workdir / FILE, _acquire(workdir / FILE, wait=wait))
    except OSError as error:
        raise UserError(f"Cannot write to {workdir} ({error.strerror}); give another --workdir.") from error
    refused = False
    try:
        yield lock
    except UserError:
        refused = True
        raise
    finally:
        lock.release()
        if is_new and refused:
            with contextlib.suppress(OSError):  # There is something in it.
                workdir.rmdir()


def _acquire(path: Path, *, wait: bool = False) -> Holder:
    """Create the lock file and return its content, or raise `UserError` that names who holds it."""
    mine = Holder.of_this_process()
    removed = False
    for _ in range(5):  # Somebody else may take the place of a dead one first; the next look then finds a living one.
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if wait:
                _await_life(path)
            _remove_dead(path)
            removed = True
            continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(mine.content())
            file.flush()
            os.fsync(file.fileno())
        if removed:
            time.sleep(SETTLE_SECONDS)
        found = _read(path)
        if found is not None and found.token == mine.token:
            return mine
    raise UserError(f"{path.parent}: other runs start in it at the same time; give another --workdir.")


def _await_life(path: Path) -> None:
    """Wait until the holder of a lock that cannot be seen from here has touched or released it, or is taken for dead.

    A job that starts again on another host finds what its first start left behind, perhaps seconds ago.
    """
    holder, age = _read(path), _age(path)
    if age is None or age >= lock_holder.STALE_SECONDS or (holder is not None and holder.alive is not None):
        return
    lock_holder.say_waiting(str(path.parent), holder, age=age)
    while age < lock_holder.STALE_SECONDS:
        time.sleep(LOOK_SECONDS)
        before, age = age, _age(path)
        if age is None or age < before:
            return


def _remove_dead(path: Path) -> None:
    """Remove the lock of a process that is gone; raise `UserError` if it lives or may live."""
    holder, age = _read(path), _age(path)
    if age is None:  # released a moment ago
        return
    lock_holder.require_dead(str(path.parent), holder, age=age)
    # Renamed before it is removed: of two processes that find the same dead lock only one gets it, and if the other has
    # put a living one in its place in between, that one is put back.
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    moved = _read(aside)
    if moved is not None and holder is not None and moved.token != holder.token:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)


def _read(path: Path) -> Holder | None:
    """Return who holds a lock, or None if there is none or its content is not (yet) complete."""
    try:
        return Holder.read(path.read_bytes())
    except FileNotFoundError:
        return None


def _age(path: Path) -> float | None:
    """Return the seconds since the lock was touched, by the clock of its file system; None if it is gone."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return None
    finally:
        probe.unlink(missing_ok=True)


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return what tells a directory from another one of its name; None if there is none."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
