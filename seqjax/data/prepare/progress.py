"""Track preparation progress in shared counters and show it in a status line.

On a terminal the line is redrawn in place; in a log it is printed at intervals.
"""

import multiprocessing
import threading
import time
from types import TracebackType

from seqjax.terminal import LOG_SECONDS, StatusLine, duration, end_with_parent

REDRAW_SECONDS = 0.5


class Progress:
    """Tokens, text bytes and source units processed so far by all processes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.tokens, self.text, self.source = (context.Value("q", 0) for _ in range(3))

    def add(self, *, tokens: int = 0, text: int = 0, source: int = 0) -> None:
        """Add to the counters."""
        for counter, value in ((self.tokens, tokens), (self.text, text), (self.source, source)):
            if value:
                with counter.get_lock():
                    counter.value += value


_progress: Progress | None = None


def start_worker(progress: Progress) -> None:
    """Initialise a worker process.

    It shares the counters and exits when the parent ends, even if the parent was killed.
    """
    use_progress(progress)
    end_with_parent()


def use_progress(progress: Progress) -> None:
    """Count this process's work in `progress`."""
    global _progress
    _progress = progress


def count(*, tokens: int = 0, text: int = 0, source: int = 0) -> None:
    """Add to this process's counters, if it has any."""
    if _progress is not None:
        _progress.add(tokens=tokens, text=text, source=source)


class Display:
    """A context that shows `counters` from a separate thread.

    `finished` is the number of finished jobs.
    """

    def __init__(self, counters: Progress, *, title: str, total: int, jobs: int):
        self.counters, self._title, self._total, self._jobs = counters, title, total, jobs
        self._line = StatusLine()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._start = time.monotonic()
        self.finished = 0

    def __enter__(self) -> "Display":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._line.say(self.line())

    def say(self, text: str) -> None:
        """Print a line above the status line."""
        self._line.say(text)

    def line(self) -> str:
        """Return the status text."""
        seconds = max(1e-3, time.monotonic() - self._start)
        done = self.counters.source.value
        share = min(1.0, done / max(1, self._total))
        text = f"{self._title} {self.finished}/{self._jobs} {100 * share:3.0f}%"
        tokens = self.counters.tokens.value
        if tokens:
            text += f" | {tokens / 1e6:,.1f}M tokens, {tokens / seconds / 1e6:.2f}M tokens/s"
            text += f", {self.counters.text.value / seconds / 1e6:.1f} MB/s"
        if 0 < share < 1:
            text += f" | ETA {duration(seconds * (1 - share) / share)}"
        return text

    def _loop(self) -> None:
        while not self._stop.wait(REDRAW_SECONDS if self._line.live else LOG_SECONDS):
            self._line.show(self.line())
