"""A signal is a request first and an interruption second, and the handlers that were there come back."""

import os
import signal

import jax
import orbax.checkpoint as ocp
import pytest

from seqjax.training.processes import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        assert stop.agreed()
        assert stop.name == number.name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_is_not_asked_twice():
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler repeats itself
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_come_back_after_an_error():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_several_processes_ask_jax_and_pass_an_interrupt_on(monkeypatch):
    """SIGTERM belongs to JAX, whose handler `signal.signal` would take away; here the test has it."""
    asked, terminations = [], []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(ocp.multihost, "reached_preemption", lambda step: asked.append(step) or step == 3)
    before = signal.signal(signal.SIGTERM, lambda *_: terminations.append(True))
    try:
        with StopRequest() as stop:
            assert [stop.agreed() for _ in range(3)] == [False, False, True]
            assert asked == [1, 2, 3]
            assert stop.name == "a signal to one of the processes"
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert (stop.name, terminations) == ("SIGINT", [True])
            assert not stop.agreed(), "not before all agree"
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
