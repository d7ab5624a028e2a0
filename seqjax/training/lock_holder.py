"""Who holds the lock of a run, in a file (lock.py) or an object (store_lock.py), and whether that process is dead.

On the same host it is recognised by the process: there is none of that pid, or it started at another time. On another
host, or in another container, it is taken for dead if it has given no sign of life for `STALE_SECONDS`.
"""

import dataclasses
import datetime
import json
import os
import socket
import sys
import uuid
from pathlib import Path

from seqjax.errors import UserError

STALE_SECONDS = 180.0


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host: Name of its machine.
        pid: Process id.
        space: Identifies the boot and the pid namespace (a container has one of its own) that `pid` belongs to.
        started: Start of the process in the kernel's units, which tells it from a later one of the same pid.
        since: Date and time of the lock.
        token: Identifies the lock itself.
    """

    host: str
    pid: int
    space: str
    started: str
    since: str
    token: str

    @classmethod
    def of_this_process(cls) -> "Holder":
        """Return what a lock says that this process takes now."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        pid = os.getpid()
        return cls(socket.gethostname(), pid, pid_space(), start_of(pid), now, uuid.uuid4().hex)

    @classmethod
    def read(cls, content: bytes | None) -> "Holder | None":
        """Return who holds a lock of this content, or None if there is none or it is not (yet) complete."""
        try:
            return cls(**json.loads(content)) if content else None
        except (ValueError, TypeError):
            return None

    def content(self) -> bytes:
        """Return the content of the lock."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @property
    def alive(self) -> bool | None:
        """Whether the process is running; None if it is out of sight, on another host or in another container."""
        if (self.host, self.space) != (socket.gethostname(), pid_space()):
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        return self.started == start_of(self.pid)


def say_waiting(where: str, holder: Holder | None, *, age: float) -> None:
    """Tell the user that a sign of life is waited for, since the last one is `age` seconds old."""
    who = f"process {holder.pid} on {holder.host}" if holder is not None else "another process"
    sys.stderr.write(
        f"{where} was left in use by {who}; waiting up to {STALE_SECONDS - age:.0f} s for a sign of life.\n"
    )
    sys.stderr.flush()


def require_dead(where: str, holder: Holder | None, *, age: float) -> None:
    """Raise `UserError` if whoever holds the lock of `where` lives or may live; `age` is that of its last sign of life.

    A holder of None is one that has not said who it is.
    """
    alive = holder.alive if holder is not None else None
    if alive is False or (alive is None and age >= STALE_SECONDS):
        return
    who = f"process {holder.pid} on {holder.host}, since {holder.since}" if holder is not None else "another process"
    wait = (
        ""
        if alive
        else f" It cannot be seen from here and showed signs of life {age:.0f} s ago: if it is dead, try again in "
        f"{STALE_SECONDS - age:.0f} s."
    )
    raise UserError(
        f"{where} is in use by {who}.{wait} Give another --workdir, or stop that run first; this one would then go on "
        "from its last checkpoint."
    )


def pid_space() -> str:
    """Return what a pid is relative to, the boot and the pid namespace; empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_of(pid: int) -> str:
    """Return the start of a process in ticks since the boot; empty if it has ended, or where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return "" if state == "Z" else fields[18]  # a zombie has ended, but its parent has not looked yet
