"""SIGTERM and SIGINT as a polite request: finish the step, save, leave. A second SIGINT interrupts at once."""

import signal
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils


class StopRequest:
    """A context in which the first SIGTERM or SIGINT sets a flag instead of killing the process."""

    def __init__(self):
        self.name = ""
        self._old = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def agreed(self, *, check: bool) -> bool:
        """Whether to stop now. Processes must stop at the same step, so several ask each other where `check` is set."""
        if jax.process_count() == 1:
            return bool(self.name)
        if not check:
            return False
        with jax.transfer_guard("allow"):
            votes = multihost_utils.process_allgather(np.asarray(bool(self.name)))
        if votes.any() and not self.name:
            self.name = "a signal to another process"
        return bool(votes.any())
