"""Terminal output, process exit, status line, sizes, durations and Ctrl-C."""

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from seqjax.escape import message


class _Log(io.FileIO):
    """A file that drops bytes after a write error.

    A full disk or a closed pipe on stderr must not end a command.
    """

    def write(self, data: Any, /) -> int:
        """Write bytes; return their number, even if they were dropped."""
        try:
            written = super().write(data)
        except OSError:
            written = None  # as with a full non-blocking pipe
        return memoryview(data).nbytes if written is None else written


def open_streams() -> None:
    """Open streams that the shell closed (`2>&-`); escape what stdout cannot encode.

    Errors on stderr are ignored, because it holds only messages. Errors on stdout are not, because it holds results.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # the next opened file would get this number
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - while it lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # prints \\xe9, for example
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        log = io.BufferedWriter(_Log(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(log, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def end_output() -> None:
    """Flush stdout; if that fails, redirect it to the null device.

    Python's flush at exit would otherwise report the failure again.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(status: int) -> NoReturn:
    """Exit this process at once.

    Python's usual shutdown destroys XLA's client. A thread that is still compiling then crashes, because an interrupt
    ends only the wait for the thread, not the compilation.
    """
    end_output()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Return a context, for imports, in which Ctrl-C exits the process at once.

    A `KeyboardInterrupt` during an import gives a long traceback or crashes an extension that is being initialised.
    """

    def end(number: int, frame: object) -> None:
        sys.stderr.write("\nInterrupted.\n")
        leave(130)

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


LOG_SECONDS = 30.0
UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


class StatusLine:
    """Shows a status line, with permanent lines above it."""

    def __init__(self, *, stream: io.TextIOBase | None = None, quiet: bool = False, log_seconds: float = LOG_SECONDS):
        # A notebook marks stderr output as an error.
        self._stream = stream or (sys.stdout if "ipykernel" in sys.modules else sys.stderr)
        self._quiet, self._between = quiet, log_seconds
        self._shown = -float("inf")
        self._width = 0
        self.live = self._stream.isatty()

    def show(self, text: str, *, last: bool = False) -> None:
        """Rewrite the status line.

        Output to a file skips the line within `log_seconds` after the previous line, unless `last` is set.
        """
        now = time.monotonic()
        if self._quiet or (not self.live and not last and now - self._shown < self._between):
            return
        self._shown, text = now, message(text)
        if self.live:
            self._write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._write(text + "\n")

    def say(self, text: str) -> None:
        """Print a permanent line above the status line."""
        if self._quiet:
            return
        if self.live and self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0
        self._write(message(text) + "\n")

    def _write(self, text: str) -> None:
        """Write to the stream, or discard the text once that fails.

        A full disk must not stop a run.
        """
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            with Path(os.devnull).open("wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())


def duration(seconds: float) -> str:
    """Format a number of seconds: 75 -> '1m15s'."""
    minutes, s = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{s:02d}s" if minutes else f"{s}s"


def size(n_bytes: int) -> str:
    """Format a number of bytes: 1536 -> '1.50 KiB'."""
    unit, name = next(((1 << bits, name) for bits, name in UNITS if n_bytes >= 1 << bits), (1, "B"))
    return f"{n_bytes / unit:.2f} {name}" if unit > 1 else f"{n_bytes} B"


def end_with_parent() -> None:
    """Make this `multiprocessing` worker exit when its parent has ended.

    A killed parent cannot stop its workers, and each worker holds hundreds of megabytes.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def tell(text: object) -> None:
    """Print text on standard output without control characters and passwords."""
    sys.stdout.write(message(text) + "\n")
