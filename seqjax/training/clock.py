"""How fast a run trains: a clock over its steps that stands still while it evaluates and saves."""

import contextlib
import time
from collections.abc import Iterator


class ThroughputClock:
    """Steps per second since the last lap; `seconds` is the training time of the whole run, resumed or not."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, step: int, *, seconds: float = 0.0) -> None:
        """Begin the first lap after `step`."""
        self.seconds = seconds
        self._step, self._begin = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """Steps per second since the lap before, which ends at `step`."""
        now = time.perf_counter()
        elapsed, steps = now - self._begin, step - self._step
        self.seconds += elapsed
        self._begin, self._step = now, step
        return steps / elapsed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside takes no time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._begin += time.perf_counter() - begin
