"""The progress line of `seqjax.data.prepare`: redrawn on a terminal, a line now and then in a log."""

import sys
import threading
import time
from types import TracebackType

from seqjax.data.shard_jobs import Progress

TERMINAL_SECONDS = 0.5
LOG_SECONDS = 30.0


class Display:
    """Shows the counters from a thread of its own while entered; `finished` counts the jobs done."""

    def __init__(self, counters: Progress, *, title: str, total: int, jobs: int):
        self._counters, self._title, self._total, self._jobs = counters, title, total, jobs
        self._terminal = sys.stderr.isatty()
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
        self._write(self.line() + "\n")

    def line(self) -> str:
        """What is shown now."""
        seconds = max(1e-3, time.monotonic() - self._start)
        done = self._counters.source.value
        share = min(1.0, done / max(1, self._total))
        text = f"{self._title} {self.finished}/{self._jobs} {100 * share:3.0f}%"
        tokens = self._counters.tokens.value
        if tokens:
            text += f" | {tokens / 1e6:,.1f}M tokens, {tokens / seconds / 1e6:.2f}M tokens/s"
            text += f", {self._counters.text.value / seconds / 1e6:.1f} MB/s"
        if 0 < share < 1:
            left = int(seconds * (1 - share) / share)
            text += f" | ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        return text

    def _loop(self) -> None:
        while not self._stop.wait(TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
            self._write(self.line() + ("" if self._terminal else "\n"))

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}" if self._terminal else text)
        sys.stderr.flush()
