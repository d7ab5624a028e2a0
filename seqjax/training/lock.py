"""The lock of a workdir: only one run writes to it at a time.

The lock is `run.lock`, a file or a store object. A run creates it only if it does not exist, touches it while alive,
and removes it at the end. A second run is refused with the first run's host and pid. A killed run's lock is recognised:
on the same machine by its missing process, elsewhere by its age on the file server's or store's clock. Readers need no
lock.

In a store the lock is advisory, because a dead run looks like a run that was cut off for minutes. Between that run's
last lock check and the end of its save, two runs can write.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from seqjax import store
from seqjax.errors import UserError
from seqjax.escape import message
from seqjax.reading import content, parse_json

FILE = "run.lock"
STALE_SECONDS = 180.0  # age at which a lock from another host or container counts as dead
BEAT_SECONDS = 20.0
LOOK_SECONDS = 1.0
SETTLE_SECONDS = 0.5  # time for other runs that saw the same dead lock to remove it
MOMENT_SECONDS = 0.05  # the same for a run that saw no lock, because one may just have been removed


class Holder(NamedTuple):
    """The process that holds a lock; `token` identifies the lock."""

    host: str
    space: str  # the boot and pid namespace of `pid`; each container has a separate namespace
    pid: int
    started: str
    since: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def alive(self) -> bool | None:
        """Whether the process is running; None on another host or in another container."""
        if (self.host, self.space) != (socket.gethostname(), pid_space()):
            return None
        return start_time_of(self.pid) == self.started


class WorkdirLock:
    """A lock that this process holds, created by `locked`."""

    def __init__(self, workdir: str, holder: Holder):
        self._workdir, self._lock, self._holder = workdir, f"{workdir}/{FILE}", holder
        self._directory_fd = None if store.url_of(workdir) else os.open(workdir, os.O_RDONLY)  # also when it is moved
        self._taken_by: Holder | str = ""
        self._last_seen = time.time()  # when this run last saw its own lock
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="workdir lock", daemon=True)
        self._thread.start()

    def check(self, *, reread: bool = False) -> None:
        """Raise `UserError` if another run has taken the workdir.

        This can happen after this process stood still for minutes. The lock is read now if `reread` is set or this
        process was suspended. In that case a moved workdir is an error too.
        """
        reread = reread or abs(time.time() - self._last_seen) > 2 * BEAT_SECONDS
        if reread and self._directory_fd is not None and not self._is_in_place():
            raise UserError(
                f"{self._workdir} was moved or deleted while this run wrote to it, so the run has stopped. To resume "
                "from the last checkpoint, run the same command with --workdir=DIR, the directory's new path."
            )
        if reread:
            with contextlib.suppress(OSError, store.StoreError):  # The next write reports it.
                self._is_held()
        if self._taken_by:
            raise UserError(
                f"{self._workdir} was taken by {self._taken_by}: this run did not touch its lock for more than "
                f"{STALE_SECONDS / 60:.0f} minutes. It stops here; the other run continues from the last checkpoint, "
                "which is intact."
            )

    def release(self) -> None:
        """Remove the lock, also from a moved directory, unless another run holds it."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError, store.StoreError):
            is_held = self._is_held()
            if self._directory_fd is None and is_held:
                store.remove(self._lock)
            elif self._directory_fd is not None and not self._taken_by:
                os.unlink(FILE, dir_fd=self._directory_fd)
        if self._directory_fd is not None:
            os.close(self._directory_fd)

    def _is_held(self) -> bool:
        """Return whether this run holds the lock, and remember the run that has taken it.

        A missing or empty lock counts as taken: another run has ended since, or is just starting.
        """
        if self._directory_fd is not None and not self._is_in_place():
            return False  # `check` reports the moved directory; its lock has moved with it.
        holder = _read(self._lock)
        if holder is None or holder.token != self._holder.token:
            self._taken_by = holder or self._taken_by or "another run"
        else:
            self._last_seen = time.time()
        return not self._taken_by

    def _is_in_place(self) -> bool:
        directory = Path(self._workdir)
        return (
            self._directory_fd is not None
            and directory.exists()
            and os.path.samestat(directory.stat(), os.fstat(self._directory_fd))
        )

    def _beat(self) -> None:
        while not self._taken_by and not self._released.wait(BEAT_SECONDS):
            # A file server or store may be unreachable for a while; other runs see this in the lock's age.
            with contextlib.suppress(OSError, store.StoreError):
                if self._is_held() and self._directory_fd is None:
                    store.write(self._lock, _content(self._holder))
                elif self._directory_fd is not None and not self._taken_by:
                    os.utime(FILE, dir_fd=self._directory_fd)


@contextlib.contextmanager
def locked(workdir: str | os.PathLike[str], *, wait: bool = False) -> Iterator[WorkdirLock]:
    """Return a context in which only this process writes to `workdir`.

    A missing directory is created. If a `UserError` leaves it empty, it is removed again. `wait` is for restarted jobs,
    which may find the lock of their first start. It waits for a run on another host until that run releases or touches
    the lock, or until the lock is `STALE_SECONDS` old.

    Raises `UserError` if another run holds the lock or it cannot be written.
    """
    url, directory = store.url_of(workdir), Path(workdir)
    is_new = not url and not directory.exists()
    if not url and not is_new and not directory.is_dir():
        raise UserError(f"--workdir={directory} is a file; give a directory.")
    try:
        if is_new:
            directory.mkdir(parents=True, exist_ok=True)
        lock = WorkdirLock(url or str(directory), _acquire(url or str(directory), wait=wait))
    except OSError as error:
        raise UserError(f"Cannot write to {directory} ({error.strerror}); give another --workdir.") from error
    refused = False
    try:
        yield lock
    except UserError:
        refused = True
        raise
    finally:
        lock.release()
        if is_new and refused:
            with contextlib.suppress(OSError):  # The directory is not empty.
                directory.rmdir()


def _acquire(workdir: str, *, wait: bool = False) -> Holder:
    """Create the lock and return its holder.

    Raises `UserError` with the holder if it is taken.
    """
    lock, pid, since = f"{workdir}/{FILE}", os.getpid(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
    seconds = MOMENT_SECONDS
    own_holder = Holder(socket.gethostname(), pid_space(), pid, start_time_of(pid), since, uuid.uuid4().hex)
    for _ in range(5):
        if _create(lock, _content(own_holder)):
            time.sleep(seconds)  # Another run that saw a dead lock here may still remove this lock by mistake.
            if (written_holder := _read(lock)) is not None and written_holder.token == own_holder.token:
                return own_holder
        elif (age := _age(lock)) is not None:
            holder = _read(lock)
            if wait and -LOOK_SECONDS < age < STALE_SECONDS and (holder is None or holder.alive is None):
                age = _wait_for_sign_of_life(workdir, holder, age)
            if age is not None:
                _require_dead(workdir, holder, age)
                store.remove(lock)
                seconds = SETTLE_SECONDS
    raise UserError(f"{workdir}: other runs start in it at the same time; give another --workdir.")


def _wait_for_sign_of_life(workdir: str, holder: Holder | None, age: float | None) -> float | None:
    """Wait for a sign of life, at most until the lock is stale.

    Returns the lock's age then, or None if it was released.
    """
    previous_age = age
    who = message(holder or "another process")
    sys.stderr.write(
        f"{workdir} was left in use by {who}; waiting up to {STALE_SECONDS - (age or 0):.0f} s for a sign of life.\n"
    )
    sys.stderr.flush()
    while age is not None and previous_age is not None and previous_age <= age < STALE_SECONDS:
        time.sleep(LOOK_SECONDS)
        previous_age, age = age, _age(f"{workdir}/{FILE}")
    return age


def _require_dead(workdir: str, holder: Holder | None, age: float) -> None:
    """Raise `UserError` if the lock's holder lives or may live; `age` is in seconds."""
    alive = holder.alive if holder is not None else None  # None: the holder has not written its name yet.
    if alive is False or (alive is None and age >= STALE_SECONDS):
        return
    who = f"{holder}, since {holder.since}" if holder is not None else "another process"
    advice = ""
    if not alive and age < -LOOK_SECONDS:  # the clock was set back
        advice = f"; its {FILE} is dated {-age:.0f} s from now: if it is dead, delete that file"
    elif not alive:
        advice = f"; it is not visible from here and touched its lock {age:.0f} s ago: if it is dead, try again in "
        advice += f"{STALE_SECONDS - age:.0f} s"
    raise UserError(
        f"{workdir} is in use by {who}{advice}. Give another --workdir, or stop that run first; this command then "
        "resumes from its last checkpoint."
    )


def _content(holder: Holder) -> bytes:
    return json.dumps(holder._asdict()).encode()


def _create(lock: str, content: bytes) -> bool:
    """Write a file or object unless it exists, and return whether it was written."""
    if store.url_of(lock):
        return store.create(lock, content)
    try:
        file = Path(lock).open("xb")  # noqa: SIM115 - closed below
    except FileExistsError:
        return False
    try:
        with file:
            file.write(content)
    except OSError:  # The disk is full. The incomplete lock would block the workdir until it is stale.
        with contextlib.suppress(OSError):
            Path(lock).unlink()
        raise
    return True


def _read(lock: str) -> Holder | None:
    """Return the lock's holder; None if the lock is missing or not (yet) complete.

    Raises `OSError` or `StoreError` if the file server or store cannot be reached.
    """
    try:
        text = store.read(lock) if store.url_of(lock) else content(lock)
        values = parse_json(text or b"", Holder.__annotations__, lock)
    except store.StoreError:
        raise
    except UserError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        return None
    return Holder(*(values[field] for field in Holder._fields))


def _age(lock: str) -> float | None:
    """Return the seconds since the lock was touched; None if it is gone.

    Both times come from the file server's or store's clock.
    """
    probe = f"{lock}.{uuid.uuid4().hex}"
    _create(probe, b"")
    try:
        now, then = store.modified(probe), store.modified(lock)
    finally:
        store.remove(probe)
    return None if now is None or then is None else (now - then).total_seconds()


def pid_space() -> str:
    """Return the boot and pid namespace that a pid belongs to; "" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_time_of(pid: int) -> str:
    """Return a process's start time in ticks; "" if the process has ended.

    Pid and start time together identify a process.
    """
    with contextlib.suppress(PermissionError):  # another user's
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:  # There is no /proc.
        return "running"
    state, *fields = stat.rpartition(")")[2].split()  # the process name may hold spaces and parentheses
    return "" if state == "Z" else fields[18]  # a zombie has ended, but its parent has not waited for it
