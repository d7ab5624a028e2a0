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
STALE_SECONDS = 180.0  # without a sign of life, after which a run that cannot be seen from here is taken for dead
BEAT_SECONDS = 20.0
LOOK_SECONDS = 1.0
SETTLE_SECONDS = 0.5  # in which other runs that saw the same dead lock remove it
MOMENT_SECONDS = 0.05  # the same, for a run that saw no lock: one may have been removed a moment before


class Holder(NamedTuple):
    """The process that holds a lock; `token` identifies the lock."""

    host: str
    space: str  # the boot and the pid namespace (a container has one of its own) that `pid` belongs to
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
        return start_of(self.pid) == self.started


class WorkdirLock:
    """A lock that this process holds, created by `locked`."""

    def __init__(self, workdir: str, holder: Holder):
        self._workdir, self._lock, self._holder = workdir, f"{workdir}/{FILE}", holder
        self._opened = None if store.url_of(workdir) else os.open(workdir, os.O_RDONLY)  # also when it is moved
        self._lost_to: Holder | str = ""
        self._seen = time.time()  # when this run last saw its own lock
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="workdir lock", daemon=True)
        self._thread.start()

    def check(self, *, look: bool = False) -> None:
        """Raise `UserError` if another run has taken the workdir.

        This can happen after this process stood still for minutes. The lock is read now if `look` is set or this
        process was suspended. In that case a moved workdir is an error too.
        """
        look = look or abs(time.time() - self._seen) > 2 * BEAT_SECONDS
        if look and self._opened is not None and not self._is_in_place():
            raise UserError(
                f"{self._workdir} was moved or deleted while this run wrote to it. Nothing more is written; to go on "
                "from the last checkpoint, run the same command again with --workdir=DIR, where it is now."
            )
        if look:
            with contextlib.suppress(OSError, store.StoreError):  # The next write reports it.
                self._is_there()
        if self._lost_to:
            raise UserError(
                f"{self._workdir} was taken by {self._lost_to}: this run gave no sign of life for more than "
                f"{STALE_SECONDS / 60:.0f} minutes. It stops here; the other run continues from the last checkpoint, "
                "which is intact."
            )

    def release(self) -> None:
        """Remove the lock, also from a moved directory, unless another run holds it."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError, store.StoreError):
            there = self._is_there()
            if self._opened is None and there:
                store.remove(self._lock)
            elif self._opened is not None and not self._lost_to:
                os.unlink(FILE, dir_fd=self._opened)
        if self._opened is not None:
            os.close(self._opened)

    def _is_there(self) -> bool:
        """Return whether this run holds the lock, and remember who has taken it.

        A missing or empty lock was taken too: another run has ended since, or is just starting.
        """
        if self._opened is not None and not self._is_in_place():
            return False  # `check` says that the directory has moved; its lock has moved with it.
        found = _read(self._lock)
        if found is None or found.token != self._holder.token:
            self._lost_to = found or self._lost_to or "another run"
        else:
            self._seen = time.time()
        return not self._lost_to

    def _is_in_place(self) -> bool:
        here = Path(self._workdir)
        return self._opened is not None and here.exists() and os.path.samestat(here.stat(), os.fstat(self._opened))

    def _beat(self) -> None:
        while not self._lost_to and not self._released.wait(BEAT_SECONDS):
            # A file server or store may be away for a while; the age of the lock tells the others.
            with contextlib.suppress(OSError, store.StoreError):
                if self._is_there() and self._opened is None:
                    store.write(self._lock, _content(self._holder))
                elif self._opened is not None and not self._lost_to:
                    os.utime(FILE, dir_fd=self._opened)


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
    mine = Holder(socket.gethostname(), pid_space(), pid, start_of(pid), since, uuid.uuid4().hex)
    for _ in range(5):
        if _create(lock, _content(mine)):
            time.sleep(seconds)  # Another that saw a dead lock here may yet remove this one, taking it for that.
            if (found := _read(lock)) is not None and found.token == mine.token:
                return mine
        elif (age := _age(lock)) is not None:
            holder = _read(lock)
            if wait and -LOOK_SECONDS < age < STALE_SECONDS and (holder is None or holder.alive is None):
                age = _awaited(workdir, holder, age)
            if age is not None:
                _require_dead(workdir, holder, age)
                store.remove(lock)
                seconds = SETTLE_SECONDS
    raise UserError(f"{workdir}: other runs start in it at the same time; give another --workdir.")


def _awaited(workdir: str, holder: Holder | None, age: float | None) -> float | None:
    """Wait for a sign of life, at most until the lock is stale.

    Returns the lock's age then, or None if it was released.
    """
    before = age
    who = message(holder or "another process")
    sys.stderr.write(
        f"{workdir} was left in use by {who}; waiting up to {STALE_SECONDS - (age or 0):.0f} s for a sign of life.\n"
    )
    sys.stderr.flush()
    while age is not None and before is not None and before <= age < STALE_SECONDS:
        time.sleep(LOOK_SECONDS)
        before, age = age, _age(f"{workdir}/{FILE}")
    return age


def _require_dead(workdir: str, holder: Holder | None, age: float) -> None:
    """Raise `UserError` if the lock's holder lives or may live; `age` is in seconds."""
    alive = holder.alive if holder is not None else None  # None: the holder has not written its name yet.
    if alive is False or (alive is None and age >= STALE_SECONDS):
        return
    who = f"{holder}, since {holder.since}" if holder is not None else "another process"
    wait = f" It cannot be seen from here and showed signs of life {age:.0f} s ago: if it is dead, try again in "
    wait = "" if alive else f"{wait}{STALE_SECONDS - age:.0f} s."
    if not alive and age < -LOOK_SECONDS:  # the clock was set back
        wait = f" Its {FILE} is dated {-age:.0f} s from now: if it is dead, delete that file."
    raise UserError(
        f"{workdir} is in use by {who}.{wait} Give another --workdir, or stop that run first; this one would then go "
        "on from its last checkpoint."
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
    except OSError:  # The disk is full: what was written names nobody, and would be respected until it is stale.
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
        found = parse_json(text or b"", Holder.__annotations__, lock)
    except store.StoreError:
        raise
    except UserError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        return None
    return Holder(*(found[field] for field in Holder._fields))


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


def start_of(pid: int) -> str:
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
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return "" if state == "Z" else fields[18]  # a zombie has ended, but its parent has not looked yet
