"""A status line on standard error, rewritten in place on a terminal and printed every half minute in a log file."""

import io
import sys
import time

LOG_SECONDS = 30.0
UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


class StatusLine:
    """Shows a status line, and permanent lines above it."""

    def __init__(self, *, stream: io.TextIOBase | None = None, quiet: bool = False, log_seconds: float = LOG_SECONDS):
        self._stream = stream or sys.stderr
        self._quiet, self._between = quiet, log_seconds
        self._shown = -float("inf")
        self._width = 0
        self.live = self._stream.isatty()

    def show(self, text: str, *, last: bool = False) -> None:
        """Rewrite the line; in a log it is skipped if one was printed shortly before, unless it is the `last`."""
        now = time.monotonic()
        if self._quiet or (not self.live and not last and now - self._shown < self._between):
            return
        self._shown = now
        if self.live:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """Print a permanent line above the status line."""
        if self._quiet:
            return
        if self.live and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0
        self._stream.write(text + "\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """Format a number of seconds: 75 -> '1m15s'."""
    minutes, s = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{s:02d}s" if minutes else f"{s}s"


def size(n_bytes: int) -> str:
    """Format a number of bytes: 1536 -> '1.50 KiB'."""
    unit, name = next(((1 << bits, name) for bits, name in UNITS if n_bytes >= 1 << bits), (1, "B"))
    return f"{n_bytes / unit:.2f} {name}" if unit > 1 else f"{n_bytes} B"
