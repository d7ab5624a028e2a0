"""The lock of a run in a store: the object `run.lock`, which says who writes there and is written anew while it lives.

On this machine, the spool has the exact lock of a local workdir (seqjax/training/lock.py). The object keeps runs on
other machines out. gs:// and s3:// write an object only if there is none when asked to, so of two that begin at once
one gets it. A lock that has not been written for `STALE_SECONDS`, by the clock of the store, is taken over: nothing can
tell a run that died from one that was cut off from the store for so long. That one ends when it finds the lock taken,
at the latest before it saves. Between its look and its save it can still write, so this is no proof against two
writers, as a lock of a local file system is.
"""

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator

from seqjax import store
from seqjax.errors import UserError
from seqjax.training import lock, lock_holder
from seqjax.training.lock import WorkdirLock
from seqjax.training.lock_holder import Holder
from seqjax.training.spool import Spool

BEAT_SECONDS = 30.0
LOOK_SECONDS = 5.0
SETTLE_SECONDS = 1.0  # in which others that saw the same dead lock write theirs


class StoreLock:
    """The locks of a spool and of its URL, held by this process; `locked` makes one."""

    def __init__(self, local: WorkdirLock, url: str, holder: Holder):
        self._local, self._url, self._holder = local, url, holder
        self._lost_to: Holder | None = None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="store lock", daemon=True)
        self._thread.start()

    def check(self, *, look: bool = False) -> None:
        """Raise `UserError` if another run has taken the workdir; with `look` the store is asked now."""
        self._local.check(look=look)
        if look:
            with contextlib.suppress(store.StoreError):  # What is to be written there will say so.
                self._look()
        if self._lost_to is not None:
            raise UserError(
                f"{self._url} was taken by process {self._lost_to.pid} on {self._lost_to.host}: this run did not reach "
                f"the store for more than {lock_holder.STALE_SECONDS / 60:.0f} minutes and was taken for dead. The "
                "last checkpoint there is good; let the other one go on."
            )

    def release(self) -> None:
        """Remove the object, unless it is another run's by now or the store cannot be reached."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(store.StoreError):
            found = _read(self._url)
            if found is not None and found.token == self._holder.token:
                store.remove(f"{self._url}/{lock.FILE}")

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            try:
                self._look()
                if self._lost_to is not None:
                    return
                _write(self._url, self._holder)
            except store.StoreError:
                continue  # A store that is away for a while; the object's age tells the others.

    def _look(self) -> None:
        found = _read(self._url)
        if found is not None and found.token != self._holder.token:
            self._lost_to = found


@contextlib.contextmanager
def locked(workdir: str | os.PathLike[str] | Spool, *, wait: bool = False) -> Iterator[WorkdirLock | StoreLock]:
    """A context in which this process alone writes to a workdir, on this machine or in a store.

    With `wait`, a run on another host is waited for until it has released the lock, has written it anew, or has not
    for `lock_holder.STALE_SECONDS`.

    Raises `UserError` if another run holds it, or it cannot be written.
    """
    spool = workdir if isinstance(workdir, Spool) else Spool(workdir)
    if not spool.url:
        with lock.locked(spool.directory, wait=wait) as local:
            yield local
        return
    with lock.locked(spool.directory, wait=wait) as local:
        held = StoreLock(local, spool.url, _acquire(spool.url, wait=wait))
        try:
            yield held
        finally:
            held.release()


def _acquire(url: str, *, wait: bool) -> Holder:
    """Write the lock and return its content, or raise `UserError` that names who holds it."""
    mine = Holder.of_this_process()
    if not store.create(f"{url}/{lock.FILE}", mine.content()):
        if wait:
            _await_life(url)
        holder, age = _read(url), _age(url)
        if holder is not None and age is not None:  # not released a moment ago
            lock_holder.require_dead(url, holder, age=age)
        _write(url, mine)
        time.sleep(SETTLE_SECONDS)
    found = _read(url)
    if found is None or found.token != mine.token:
        raise UserError(f"{url}: other runs start in it at the same time; give another --workdir.")
    return mine


def _await_life(url: str) -> None:
    """Wait until the holder of a lock that cannot be seen from here shows a sign of life, or is taken for dead."""
    holder, age = _read(url), _age(url)
    if holder is None or age is None or holder.alive is not None:
        return
    written, begin = store.modified(f"{url}/{lock.FILE}"), time.monotonic() - age
    if age < lock_holder.STALE_SECONDS:
        lock_holder.say_waiting(url, holder, age=age)
    while time.monotonic() - begin < lock_holder.STALE_SECONDS:
        time.sleep(LOOK_SECONDS)
        if store.modified(f"{url}/{lock.FILE}") != written:
            return


def _read(url: str) -> Holder | None:
    return Holder.read(store.read(f"{url}/{lock.FILE}"))


def _write(url: str, holder: Holder) -> None:
    store.write(f"{url}/{lock.FILE}", holder.content())


def _age(url: str) -> float | None:
    """Return the seconds since the lock was written, by the clock of the store; None if it is gone."""
    probe = f"{url}/{lock.FILE}.{uuid.uuid4().hex}"
    store.write(probe, b"")
    try:
        now, then = store.modified(probe), store.modified(f"{url}/{lock.FILE}")
    finally:
        store.remove(probe)
    return None if now is None or then is None else (now - then).total_seconds()
