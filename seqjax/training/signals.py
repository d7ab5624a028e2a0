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
        self.agreed_on = False
        self._asked = 0
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

    def agreed(self) -> bool:
        """Return whether to stop after this step, on which several processes, who must all ask at every one, agree.

        `agreed_on` is the last answer.
        """
        # A count of its own, because that of the steps goes back after a cooldown, which JAX's service does not expect.
        self._asked += 1
        self.agreed_on = ocp.multihost.reached_preemption(self._asked) if self._several else bool(self.name)
        if self.agreed_on and not self.name:
            self.name = "a signal to one of the processes"
        return self.agreed_on
