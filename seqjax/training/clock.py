"""Measures the training speed of a run with a clock that is paused during evaluation and saving."""

import contextlib
import time
from collections.abc import Iterator


class ThroughputClock:
    """Measures steps per second between laps; `seconds` is the training time of the whole run across resumptions."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, step: int, *, seconds: float = 0.0) -> None:
        """Start the first lap after `step`."""
        self.seconds = seconds
        self._step, self._begin = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """End a lap at `step` and return its steps per second."""
        now = time.perf_counter()
        elapsed, steps = now - self._begin, step - self._step
        self.seconds += elapsed
        self._begin, self._step = now, step
        return steps / elapsed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in this context."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._begin += time.perf_counter() - begin
