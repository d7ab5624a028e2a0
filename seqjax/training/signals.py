"""Graceful shutdown: SIGTERM or SIGINT lets the run finish its step, save and exit; a second SIGINT interrupts it."""

import signal
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils


class StopRequest:
    """A context in which the first SIGTERM or SIGINT sets `name` to the signal's name instead of ending the process."""

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
        """Return whether to stop now; several processes, which must stop at the same step, agree on it if `check`."""
        if jax.process_count() == 1:
            return bool(self.name)
        if not check:
            return False
        with jax.transfer_guard("allow"):
            votes = multihost_utils.process_allgather(np.asarray(bool(self.name)))
        if votes.any() and not self.name:
            self.name = "a signal to another process"
        return bool(votes.any())
