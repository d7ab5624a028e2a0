"""The lock of a preparation: one process at a time prepares text in a directory.

The operating system releases the lock when its process ends, even if it was killed, so no lock is ever stale.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from seqjax.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing refuses a second process
    fcntl = None

FILE = ".seqjax-prepare.lock"
ATTEMPTS = 100  # to open and lock a file that other processes remove when they end
# Values of `OSError.errno` of a file system without locks, where nothing refuses a second process.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Return a context in which only this process prepares text in `out`.

    `out` is created, and removed if it is empty at the end. Raises `UserError` with the name of the process that holds
    the lock.
    """
    try:
        file = _acquired(out)
    except OSError as error:
        raise UserError(f"Cannot write to {out}: {error.strerror}; give another --out.") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if _is_at(file, out):  # If the file was deleted, the new one is another process's.
                (out / FILE).unlink()
        os.close(file)
        with contextlib.suppress(OSError):
            out.rmdir()


def _acquired(out: Path) -> int:
    """Return the descriptor of the locked lock file.

    The holder removes the file and an empty `out` when it ends, so opening and locking may need several attempts.
    """
    for retries_left in reversed(range(ATTEMPTS)):
        try:
            out.mkdir(parents=True, exist_ok=True)
            file = os.open(out / FILE, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except (FileNotFoundError, FileExistsError):  # Another process has removed the empty directory.
            if not retries_left:
                raise
            continue
        try:
            _lock(file, out)
            if _is_at(file, out):
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # The process that held the lock has ended and removed the file.
    raise UserError(f"{out}: other processes prepare text there; give another --out.")


def _is_at(file: int, out: Path) -> bool:
    """Return whether an open lock file is the one in `out`."""
    try:
        return os.path.samestat(os.fstat(file), (out / FILE).lstat())
    except OSError:
        return False


def _holder(file: int) -> str:
    """Return the name in a lock file; its holder writes it right after locking."""
    for _ in range(ATTEMPTS):
        if name := os.pread(file, 300, 0).decode(errors="replace"):
            return name
        time.sleep(0.01)
    return ""


def _lock(file: int, out: Path) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _holder(file) or "another process"
        raise UserError(
            f"{out}: {holder} prepares text there. Wait until it has ended and run the same command again, or give "
            "another --out."
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
