"""Graceful shutdown: SIGTERM or SIGINT lets the run finish its step, save and exit; a second SIGINT interrupts it.

In several processes SIGTERM belongs to JAX's preemption service: a signal to one of them is told to all, and they agree
on a step that none has passed. It also notes a signal that comes before the training loop.
"""

import os
import signal
from types import FrameType

import jax
import orbax.checkpoint as ocp


class StopRequest:
    """A context in which the first SIGTERM or SIGINT sets `name` to the signal's name instead of ending the process."""

    def __init__(self):
        self.name = ""
        self._old = {}
        self._several = jax.process_count() > 1

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT,) if self._several else (signal.SIGTERM, signal.SIGINT):
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
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def agreed(self, step: int) -> bool:
        """Return whether to stop after `step`, which several processes, who must all ask at every step, agree on."""
        if not self._several:
            return bool(self.name)
        stopping = ocp.multihost.reached_preemption(step)
        if stopping and not self.name:
            self.name = "a signal to one of the processes"
        return stopping
