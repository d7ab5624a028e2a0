"""The lock of a preparation: one process at a time prepares text in a directory.

The system releases the lock at the end of its process, even if that was killed, so no lock is ever stale.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from seqjax.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing refuses a second process
    fcntl = None

FILE = ".seqjax-prepare.lock"
# Values of `OSError.errno` of a file system without locks, where nothing refuses a second process.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Return a context in which only this process prepares text in `out`, which is created.

    A directory that is empty at the end is removed. Raises `UserError` that names the process that holds the lock.
    """
    path = out / FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = _acquired(path)
    except OSError as error:
        raise UserError(f"Cannot write to {out}: {error.strerror}; give another --out.") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)
        with contextlib.suppress(OSError):
            out.rmdir()


def _acquired(path: Path) -> int:
    """Return the descriptor of the lock file after locking it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _lock(file, path.parent)
            if os.path.samestat(os.fstat(file), path.stat()):
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
        except FileNotFoundError:
            pass  # The process that held the lock has ended and removed the file: make a new one.
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(file: int, out: Path) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(file, 300).decode(errors="replace") or "another process"
        raise UserError(
            f"{out}: {holder} prepares text there. Wait until it has ended and run the same command again, or give "
            "another --out."
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
